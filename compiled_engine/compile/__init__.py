"""How a graph is made.

A model is captured once, its graph rewritten by passes, split at attention, equal pieces are compiled once, and the
whole becomes a plan of straight-line steps. This room knows graphs, and neither requests nor runners.
"""
