"""Kernels of the GPU backend: paged attention and sampling, written in Triton.

Importing a module of this folder imports Triton; nothing outside the GPU path does. Every launch depends on shapes and
on a step's few launch values alone, so a step can be captured into a graph and replayed with other contents.
"""
