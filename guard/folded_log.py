"""Warnings of the HTTP server that any client can cause as often as it likes: of each kind one line a minute, which
says how many were like it. Metrics count every one."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

SERVER_LOG = "uvicorn.error"
FOLD_S = 60.0


class Folded(logging.Filter):
    """Of records below ``ERROR`` that have the same text before their values are put in. These texts are the program's,
    so that there are few."""

    def __init__(self) -> None:
        super().__init__()
        self._said_s: dict[str, float] = {}
        self._untold: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        text, now_s = str(record.msg), time.monotonic()
        if now_s - self._said_s.get(text, float("-inf")) < FOLD_S:
            self._untold[text] += 1
            return False
        self._said_s[text] = now_s
        if untold := self._untold.pop(text, 0):
            record.msg = f"{text} (and {untold} more since the last such line; said at most once a minute)"
        return True


@contextmanager
def folded() -> Iterator[None]:
    """While a server runs."""
    log, filter_ = logging.getLogger(SERVER_LOG), Folded()
    log.addFilter(filter_)
    try:
        yield
    finally:
        log.removeFilter(filter_)
