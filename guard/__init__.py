"""The guard: an OpenAI-compatible proxy in front of vLLM that decides on what the serving model computes inside."""

__version__ = "0.1.0"
