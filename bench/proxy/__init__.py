"""What the proxy itself costs: load from many clients at once, in front of an engine that is never the limit."""
