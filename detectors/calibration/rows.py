"""Labelled conversations, split: what calibration reads with the model.

Owns composing. User texts stand as they are; pasted texts and documents follow or precede a task in the user message,
because templates of small models have no tool role. spikee's attacks are jailbreak x instruction, said by the user or
put at the start, middle or end of a document; jailbreak families, instructions and documents never cross splits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from detectors.calibration.sources import (
    Frames,
    Label,
    Seed,
    Text,
    bastion_texts,
    own_documents,
    own_frames,
    own_prompts,
    spikee_benign_texts,
    spikee_instructions,
    spikee_jailbreaks,
)
from detectors.calibration.split import Split, assign_splits, merge_near_duplicates

ATTACKS_PER_JAILBREAK = 10
ROWS_PER_DOCUMENT = 4
OPENING_SHARE = 0.25
"""Share of conversations that start with an earlier exchange."""

Message = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One conversation. ``text`` is its untrusted part alone, as a text filter would see it."""

    id: str
    source: str
    group: str
    split: Split
    label: Label
    lang: str
    text: str
    messages: tuple[Message, ...]


def default_rows(seed: int) -> list[Row]:
    """The rows of all named sets, framed and split. Same seed and same installed sets, same rows."""
    return [*_text_rows(seed), *_composed_rows(seed)]


def rows_hash(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.split, row.label, row.messages]).encode())
    return digest.hexdigest()


def _text_rows(seed: int) -> list[Row]:
    frames = own_frames()
    texts = [*bastion_texts(), *spikee_benign_texts(), *own_prompts()]
    groups = merge_near_duplicates([t.text for t in texts], [t.family for t in texts])
    splits = assign_splits(groups, [f"{t.source}:{t.label}" for t in texts], seed)
    return [
        _frame(text.id, text.source, group, splits[group], text.label, text.lang, _said(text, frames, seed), frames)
        for text, group in zip(texts, groups, strict=True)
    ]


def _composed_rows(seed: int) -> list[Row]:
    frames = own_frames()
    jailbreaks = _split_seeds(spikee_jailbreaks(), seed)
    instructions = _split_seeds(spikee_instructions(), seed)
    documents = _split_seeds(own_documents(), seed)
    rows = []
    for split in ("train", "validation", "held_out"):
        for document in documents[split]:
            for task in _pick(frames.tasks, ROWS_PER_DOCUMENT, f"{seed}|{document.id}"):
                row_id = f"{document.id}-{frames.tasks.index(task)}"
                said = task.replace("{text}", document.text)
                rows.append(_frame(row_id, "own", document.family, split, "benign", "en", said, frames))
        for jailbreak in jailbreaks[split]:
            for i in range(ATTACKS_PER_JAILBREAK):
                row_id = f"spikee-{jailbreak.id}-{i}"
                (instruction,) = _pick(instructions[split], 1, f"{seed}|i|{row_id}")
                attack = jailbreak.text.replace("<INSTRUCTION>", instruction.text)
                # A bare instruction is an attack only where nobody has asked for it: in a document.
                if i % 2 or jailbreak.family == "no-jailbreak":
                    (document,) = _pick(documents[split], 1, f"{seed}|d|{row_id}")
                    (task,) = _pick(frames.tasks, 1, f"{seed}|t|{row_id}")
                    attack = task.replace("{text}", _insert(document.text, attack, _number(row_id) % 3))
                rows.append(_frame(row_id, "spikee", jailbreak.family, split, "attack", "en", attack, frames))
    return rows


def _split_seeds(seeds: list[Seed], seed: int) -> dict[Split, list[Seed]]:
    groups = merge_near_duplicates([s.text for s in seeds], [s.family for s in seeds])
    splits = assign_splits(groups, ["all"] * len(seeds), seed)
    divided: dict[Split, list[Seed]] = {"train": [], "validation": [], "held_out": []}
    for one, group in zip(seeds, groups, strict=True):
        divided[splits[group]].append(one)
    return divided


def _said(text: Text, frames: Frames, seed: int) -> str:
    if not text.pasted:
        return text.text
    (task,) = _pick(frames.tasks, 1, f"{seed}|t|{text.id}")
    return task.replace("{text}", text.text)


def _insert(document: str, attack: str, position: int) -> str:
    """position: 0 start, 1 middle, 2 end of the document; between its lines."""
    lines = document.split("\n")
    at = (0, (len(lines) + 1) // 2, len(lines))[position]
    return "\n".join([*lines[:at], attack, *lines[at:]])


def _frame(
    row_id: str, source: str, group: str, split: Split, label: Label, lang: str, said: str, frames: Frames
) -> Row:
    number = _number(row_id)
    messages: list[Message] = [{"role": "system", "content": frames.systems[number % len(frames.systems)]}]
    if number // 1000 % 100 < 100 * OPENING_SHARE:
        user, answer = frames.openings[number // 100_000 % len(frames.openings)]
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": said})
    return Row(row_id, source, group, split, label, lang, said, tuple(messages))


def _pick(items: Sequence[T], count: int, key: str) -> list[T]:
    """``count`` different items, always the same for the same key."""
    order = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{key}|{i}".encode()).digest())
    return [items[i] for i in order[:count]]


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
