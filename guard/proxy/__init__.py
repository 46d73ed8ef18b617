"""The proxy: an OpenAI-compatible front of vLLM that decides and acts on each request."""
