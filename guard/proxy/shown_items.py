"""What a client has of a streamed response: its items, as far as the events that left say them.

Owns putting events together into items, and the events that end those that are open. A call that is not complete is no
item: half of its arguments are not to be acted on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]

DELTA, DONE = ".delta", ".done"

TEXTS = {
    "response.output_text": ("content", "output_text", "text"),
    "response.refusal": ("content", "refusal", "refusal"),
    "response.reasoning_text": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text": ("summary", "summary_text", "text"),
}
"""Kinds of events that say the text of a part: the item's list that has the part, the part's type and its field."""

PARTS = {
    "output_text": ("response.content_part", "content_index"),
    "refusal": ("response.content_part", "content_index"),
    "reasoning_text": ("response.reasoning_part", "content_index"),
    "summary_text": ("response.reasoning_summary_part", "summary_index"),
}
"""By type of a part: the kind of the events that open and close it, and the field that counts it."""

Place = tuple[int, str, int]
"""An item's index, the kind of its texts' events, and the part's index."""


@dataclass
class ShownItems:
    """``open``: items that have begun, by index; ``done``: those that ended; ``texts``: of the open ones' parts."""

    open: dict[int, Fields] = field(default_factory=dict)
    done: dict[int, Fields] = field(default_factory=dict)
    texts: dict[Place, list[str]] = field(default_factory=dict)
    ended: set[Place] = field(default_factory=set)
    closed: set[Place] = field(default_factory=set)

    def add(self, event: Fields) -> None:
        """One more event has left, as the client got it."""
        kind, index = str(event.get("type", "")), event.get("output_index")
        if not isinstance(index, int):
            return
        if kind == "response.output_item.added" and isinstance(event.get("item"), dict):
            self.open[index] = event["item"]
        elif kind == "response.output_item.done" and isinstance(event.get("item"), dict):
            self.open.pop(index, None)
            self.done[index] = event["item"]
            self.texts = {place: text for place, text in self.texts.items() if place[0] != index}
        else:
            self._add_text(index, kind, event)

    def _add_text(self, index: int, kind: str, event: Fields) -> None:
        of_what = kind.rpartition(".")[0]
        if of_what in TEXTS:
            _, part, name = TEXTS[of_what]
            place = (index, of_what, _count(event, PARTS[part][1]))
            if kind.endswith(DELTA) and isinstance(event.get("delta"), str):
                self.texts.setdefault(place, []).append(event["delta"])
            elif kind.endswith(DONE) and isinstance(event.get(name), str):
                self.texts[place] = [event[name]]
                self.ended.add(place)
        elif kind.endswith(DONE):
            for place in self._parts(index):
                of_part, counted = PARTS[TEXTS[place[1]][1]]
                if of_part == of_what and _count(event, counted) == place[2]:
                    self.closed.add(place)

    def items(self) -> list[Fields]:
        """All of them; open ones as far as they came."""
        begun = {index: self._as_far(index, item) for index, item in self.open.items() if self._parts(index)}
        return [item for _, item in sorted({**self.done, **begun}.items())]

    def endings(self) -> Iterator[Fields]:
        """Events that end what is open, in order, without their number."""
        for index, item in sorted(self.open.items()):
            whole = self._as_far(index, item)
            for place in self._parts(index):
                _, part_type, name = TEXTS[place[1]]
                of_part, counted = PARTS[part_type]
                at = {"item_id": item.get("id"), "output_index": index, counted: place[2]}
                part = self._part(place)
                logprobs: Fields = {"logprobs": []} if part_type == "output_text" else {}
                if place not in self.ended:
                    yield {"type": place[1] + DONE, **at, name: part[name], **logprobs}
                if place not in self.closed:
                    yield {"type": of_part + DONE, **at, "part": part}
            if self._parts(index):
                yield {"type": "response.output_item.done", "output_index": index, "item": whole}

    def _parts(self, index: int) -> list[Place]:
        return sorted((place for place in self.texts if place[0] == index), key=lambda place: place[2])

    def _part(self, place: Place) -> Fields:
        _, part_type, name = TEXTS[place[1]]
        beside: Fields = {"annotations": []} if part_type == "output_text" else {}
        return {"type": part_type, name: "".join(self.texts[place]), **beside}

    def _as_far(self, index: int, item: Fields) -> Fields:
        parts: dict[str, list[Fields]] = {}
        for place in self._parts(index):
            parts.setdefault(TEXTS[place[1]][0], []).append(self._part(place))
        return {**item, **parts, "status": "incomplete"}


def _count(event: Fields, name: str) -> int:
    return event[name] if isinstance(event.get(name), int) else 0
