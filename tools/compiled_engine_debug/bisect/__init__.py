"""Bisecting a wrong result: the same prompts up a ladder from transformers to padded graph replay.

Neighbouring rungs are compared tensor by tensor. The first rung, step, request, layer and tensor that part ways are
named, then the piece and the node of its graph that made that tensor.
"""
