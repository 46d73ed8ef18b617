"""Uses of the aperture beside guarding: ranking documents and linking questions to a schema by the model's attention.

Each use is one file with its formula, and asks for readouts through ``asking.Ask``: offline or served alike.
"""
