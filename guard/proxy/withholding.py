"""Frames of a stream that are not released yet, each choice in its own queue.

Owns the order of release: within a choice as they came, and what belongs to no choice last.
"""

from __future__ import annotations

import time
from collections import Counter, deque

from guard.proxy.wire import Frame


class Withheld:
    def __init__(self) -> None:
        self._queues: dict[int | None, deque[Frame]] = {}

    def add(self, frame: Frame) -> None:
        frame.came_s = time.perf_counter()
        self._queues.setdefault(frame.choice, deque()).append(frame)

    def due(self, tokens: Counter[int], window: int) -> list[Frame]:
        """Take those that ``window`` tokens of their choice came after. tokens: of each choice so far."""
        found = []
        for choice, queue in self._queues.items():
            while choice is not None and queue and tokens[choice] - queue[0].place >= window:
                found.append(queue.popleft())
        return found

    def rest(self) -> list[Frame]:
        """Take all."""
        found = [frame for choice, queue in self._queues.items() if choice is not None for frame in queue]
        found += self._queues.get(None, ())
        self._queues.clear()
        return found
