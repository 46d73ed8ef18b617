"""Analyzers with MIA's interface: probes in, a small result out. ``guard.mia.registry`` finds them by name."""
