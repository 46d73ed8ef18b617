"""Detectors: readouts of the model's internals in, calibrated scores out."""
