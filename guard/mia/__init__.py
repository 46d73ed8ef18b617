"""The aperture: captures and steers model internals per request inside vLLM."""
