"""What runs on the device.

Attention over paged caches (a dense reference and one implementation per backend), matrix products with packed
weights, and sampling. Ops find caches through the context; they know no graphs and no requests.
"""
