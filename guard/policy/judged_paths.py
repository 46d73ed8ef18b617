"""The paths whose requests policies judge: what ``match.routes`` of a selection may name.

Owns the table that the proxy serves by. Some paths are spellings of one route, under which their requests are counted.
"""

from __future__ import annotations

ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
EMBEDDINGS = "/v1/embeddings"
RERANK = ("/v1/rerank", "/rerank", "/v2/rerank")
"""Paths of one API, where the reranker is on; the first is the route."""

JUDGED = {**{path: path for path in (*ANSWERS, EMBEDDINGS)}, **dict.fromkeys(RERANK, RERANK[0])}
"""Path -> route."""


def route_of(path: str) -> str:
    """Raises ``ValueError`` for a path whose requests no policy judges."""
    if path not in JUDGED:
        raise ValueError(f"no policy judges requests to {path!r}; the paths are {', '.join(JUDGED)}")
    return JUDGED[path]
