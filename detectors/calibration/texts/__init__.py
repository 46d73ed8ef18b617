"""Texts of our own, as YAML: ordinary prompts, ordinary documents, and what surrounds them in a conversation."""
