"""Texts of requests that the console may show: of the playground's own runs, which an operator wrote.

Owns how many are kept, in memory. Never reads what a policy does not allow to be captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_KEPT = 200


@dataclass(frozen=True)
class Content:
    """``fields``: of the request's body, what its prompt is made from. ``answer``: its text as far as there is one."""

    fields: Mapping[str, Any]
    answer: str = ""


@dataclass
class Contents:
    """By number of the finished request."""

    _kept: OrderedDict[int, Content] = field(default_factory=OrderedDict)

    def keep(self, number: int, content: Content) -> None:
        self._kept[number] = content
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def get(self, number: int) -> Content | None:
        return self._kept.get(number)
