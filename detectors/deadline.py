"""Until when work is wanted: whoever reads a long text looks now and then, and gives up when it is too late.

Owns that moment, of a thread or task. Never stops anything by itself: no thread can be stopped from outside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf


class TooLateError(Exception):
    """Nobody waits for the result any more."""


@dataclass
class Deadline:
    """``moment_s``: on the clock of ``time.monotonic``. May be brought forward while the work is done."""

    moment_s: float = inf

    def give_up(self) -> None:
        self.moment_s = -inf


_DEADLINE: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Inside the block ``check_deadline`` is about this one."""
    before = _DEADLINE.set(deadline)
    try:
        yield
    finally:
        _DEADLINE.reset(before)


def check_deadline() -> None:
    """Raises ``TooLateError`` when the result is not wanted any more. Cheap enough for every few thousand steps."""
    deadline = _DEADLINE.get()
    if deadline is not None and time.monotonic() >= deadline.moment_s:
        raise TooLateError
