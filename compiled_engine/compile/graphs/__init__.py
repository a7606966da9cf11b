"""How a step is captured and replayed.

Which sizes are captured, which captured graph serves a step, and the backends that capture, check and replay. This
room knows shapes and addresses, and neither requests nor what the kernels compute.
"""
