"""Steering vectors: learnt from pairs of examples, tried layer by layer, and written where an engine loads them by name.

What a vector does to the model's stream is ``guard.mia``'s; here is where vectors come from and what they are worth.
"""
