"""Steering vectors: learnt from pairs of examples, tried layer by layer, written where engines load them by name.

What a vector does to the model's stream is ``guard.mia``'s; here is where vectors come from and what they are worth.
"""
