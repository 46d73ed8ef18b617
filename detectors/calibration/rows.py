"""Labelled conversations, split: what calibration reads with the model.

Owns composing. What a user says stands as it is. Pasted texts and documents follow or precede a task in the user
message, or come from a tool where the model's template knows that role. Attacks inside documents stand at their start,
middle or end; jailbreak families, instructions, documents and injections never cross splits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from detectors.calibration.sets.catalogue import INSTALLED, SETS
from detectors.calibration.sets.content import Content, number_of, pick
from detectors.calibration.sources import (
    DataError,
    Frames,
    Label,
    Seed,
    Text,
    own_documents,
    own_frames,
    own_quotations,
    spikee_instructions,
    spikee_jailbreaks,
)
from detectors.calibration.split import SPLITS, Split, assign_splits, merge_near_duplicates

ATTACKS_PER_JAILBREAK = 10
OPENING_SHARE = 0.25
"""Share of conversations that start with an earlier exchange."""

Message = dict[str, str]
Place = Literal["user", "document", "tool"]
Position = Literal["", "start", "middle", "end"]
POSITIONS: tuple[Position, ...] = ("start", "middle", "end")


@dataclass(frozen=True)
class Row:
    """One conversation. ``text`` is its untrusted part alone, as a text filter would see it.

    ``place``: who brings the text: the user says it, pastes it as a document, or a tool returns it. ``position``: where
    in a document an attack stands; empty when it is the whole text. ``hard``: benign, and made to look like an attack.
    """

    id: str
    source: str
    group: str
    split: Split
    label: Label
    lang: str = "en"
    text: str = ""
    messages: tuple[Message, ...] = ()
    hard: bool = False
    place: Place = "user"
    position: Position = ""
    origin: str = ""
    """Where a row of the user's own was written: ``FILE: row N``."""

    @property
    def named(self) -> str:
        """For messages to people."""
        return self.origin or f"row {self.id}"

    def with_attack(self, position: Position) -> Row:
        """The same row with an attack at ``position``, under an id of its own; its text is still to be put in."""
        return replace(self, id=f"{self.id}-{position}", label="attack", position=position)


def default_rows(seed: int, names: Sequence[str] = INSTALLED, *, tool_role: bool = False) -> list[Row]:
    """The rows of named sets, framed and split. Same seed, same sets and same versions: same rows.

    ``tool_role``: put half of what is pasted into messages of the role ``tool``. Raises ``DataError``.
    """
    if unknown := sorted(set(names) - SETS.keys()):
        raise DataError(f"no data set {', '.join(unknown)}; there are: {', '.join(sorted(SETS))}")
    contents = {name: SETS[name].content() for name in names}
    composer = Composer(seed, own_frames(), tool_role)
    rows = composer.texts([text for content in contents.values() for text in content.texts])
    rows += [row for name, content in contents.items() for row in composer.documents(name, content)]
    if "spikee" in names:
        rows += composer.spikee()
    if "own" in names:
        rows += composer.quotations()
    return rows


def rows_hash(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.split, row.label, row.messages]).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Composer:
    """Puts texts into conversations. What surrounds a text is drawn by a hash of its row's id, for both labels."""

    seed: int
    frames: Frames
    tool_role: bool

    def texts(self, texts: Sequence[Text]) -> list[Row]:
        groups = merge_near_duplicates([t.text for t in texts], [t.family for t in texts])
        splits = assign_splits(groups, [f"{t.source}:{t.label}" for t in texts], self.seed)
        rows = []
        for text, group in zip(texts, groups, strict=True):
            start = Row(text.id, text.source, group, splits[group], text.label, text.lang, hard=text.hard)
            rows.append(self.brought(start, text.text) if text.pasted else self.said(start, text.text))
        return rows

    def documents(self, name: str, content: Content) -> Iterator[Row]:
        """Documents as they are, and goals in templates in documents."""
        documents, templates, goals = (
            divided(seeds, self.seed) for seeds in (content.documents, content.templates, content.goals)
        )
        for split in SPLITS:
            for document in documents[split]:
                for i in range(content.rows_per_document):
                    yield self.brought(Row(f"{document.id}-{i}", name, document.family, split, "benign"), document.text)
            for template in templates[split]:
                for goal in goals[split]:
                    attack = template.text.replace("{goal}", goal.text)
                    for i in range(content.rows_per_injection):
                        row = Row(f"{template.id}-{goal.id}-{i}", name, template.family, split, "attack")
                        yield self.injected(row, attack, documents[split])

    def spikee(self) -> Iterator[Row]:
        jailbreaks = divided(spikee_jailbreaks(), self.seed)
        instructions = divided(spikee_instructions(), self.seed)
        documents = divided(own_documents(), self.seed)
        for split in SPLITS:
            for jailbreak in jailbreaks[split]:
                for i in range(ATTACKS_PER_JAILBREAK):
                    row_id = f"spikee-{jailbreak.id}-{i}"
                    (instruction,) = pick(instructions[split], 1, f"{self.seed}|i|{row_id}")
                    attack = jailbreak.text.replace("<INSTRUCTION>", instruction.text)
                    row = Row(row_id, "spikee", jailbreak.family, split, "attack")
                    # A bare instruction is an attack only where nobody has asked for it: in a document.
                    inside = i % 2 == 1 or jailbreak.family == "no-jailbreak"
                    yield self.injected(row, attack, documents[split]) if inside else self.said(row, attack)

    def quotations(self) -> Iterator[Row]:
        frames, phrases = (divided(seeds, self.seed) for seeds in own_quotations())
        for split in SPLITS:
            for frame in frames[split]:
                for phrase in phrases[split]:
                    row_id = f"{frame.id}-{phrase.id}"
                    row = Row(row_id, "own", frame.family, split, "benign", hard=True)
                    yield self.said(row, frame.text.replace("{phrase}", phrase.text))

    def injected(self, row: Row, attack: str, documents: Sequence[Seed]) -> Row:
        (document,) = pick(documents, 1, f"{self.seed}|d|{row.id}")
        position = POSITIONS[number_of(row.id) % 3]
        return self.brought(replace(row, position=position), insert(document.text, attack, position))

    def brought(self, row: Row, text: str) -> Row:
        """``text`` from a tool or pasted by the user."""
        place: Place = "tool" if self.tool_role and number_of(f"tool|{row.id}") % 2 else "document"
        return self.brought_by(place, row, text)

    def brought_by(self, place: Place, row: Row, text: str) -> Row:
        if place == "tool":
            ((task, answer),) = pick(self.frames.tool_tasks, 1, f"{self.seed}|tool|{row.id}")
            turns = ({"role": "user", "content": task}, {"role": "assistant", "content": answer})
            messages = (*self.opening(row.id), *turns, {"role": "tool", "content": text})
            return replace(row, text=text, messages=messages, place="tool")
        (task,) = pick(self.frames.tasks, 1, f"{self.seed}|t|{row.id}")
        return replace(self.said(row, task.replace("{text}", text)), place="document")

    def said(self, row: Row, text: str) -> Row:
        return replace(row, text=text, messages=(*self.opening(row.id), {"role": "user", "content": text}))

    def opening(self, row_id: str) -> tuple[Message, ...]:
        number = number_of(row_id)
        system = {"role": "system", "content": self.frames.systems[number % len(self.frames.systems)]}
        if number // 1000 % 100 >= 100 * OPENING_SHARE:
            return (system,)
        user, answer = self.frames.openings[number // 100_000 % len(self.frames.openings)]
        return (system, {"role": "user", "content": user}, {"role": "assistant", "content": answer})


def insert(document: str, attack: str, position: Position) -> str:
    """``attack`` between the lines of ``document``; of one line, between its sentences."""
    separator = "\n" if "\n" in document else ". "
    lines = document.split(separator)
    at = {"start": 0, "middle": (len(lines) + 1) // 2, "end": len(lines)}[position or "end"]
    before, after = separator.join(lines[:at]), separator.join(lines[at:])
    return "\n".join(part for part in (before, attack, after) if part)


def divided(seeds: Sequence[Seed], seed: int) -> dict[Split, list[Seed]]:
    """Building blocks by split, near-duplicates together."""
    divided: dict[Split, list[Seed]] = {"train": [], "validation": [], "held_out": []}
    if not seeds:
        return divided
    groups = merge_near_duplicates([s.text for s in seeds], [s.family for s in seeds])
    splits = assign_splits(groups, ["all"] * len(seeds), seed)
    for one, group in zip(seeds, groups, strict=True):
        divided[splits[group]].append(one)
    return divided
