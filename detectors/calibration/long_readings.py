"""What the model makes of long documents: of each whole, with the attention on every token, and of its windows.

Owns reading and keeping them, for ``measure_windows``. Of a whole one 270 weights for each token are kept as float16:
2 MiB for 4,000 tokens of SmolLM2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from detectors.calibration.captures import Captures, spec_of
from detectors.calibration.data import template_of
from detectors.calibration.feature_store import FeatureError, FeatureStore, Kept, Plan, Reading
from detectors.calibration.features import full_plan, model_shape, most_tokens, read_features
from detectors.calibration.long_documents import Case
from detectors.calibration.readers import offline_reader
from detectors.calibration.rows import Row
from detectors.windows import DATA, INSTRUCTION, Windows, cut, pass_messages, texts_in
from guard.mia.results import AttentionReadout, FloatArray, HiddenReadout
from guard.mia.spec import AttentionCapture, HiddenCapture
from guard.model_weights import weights_sha256

WHOLE = "whole"
AT_ONCE = 4
"""Whole documents: their weights are in memory together."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Whole:
    """One document read whole. weights: ``[heads, tokens]``, of the last prompt token; mass: ``[heads, 2]``; last:
    ``[layers, hidden_size]``; instruction, data: token ranges; attack: token range, None without one."""

    weights: FloatArray
    mass: FloatArray
    last: FloatArray
    instruction: tuple[tuple[int, int], ...]
    data: tuple[tuple[int, int], ...]
    attack: tuple[int, int] | None


@dataclass(frozen=True)
class ReadWindow:
    """One window in a pass of its own. ``overlap``: the share of the attack that is in it."""

    reading: Reading
    overlap: float


class LongReader:
    """Of one model, at ``layers``, with all heads."""

    def __init__(self, model: Path, layers: Sequence[int], folder: Path | None = None) -> None:
        self.model, self.heads = model, full_plan(model_shape(model)).heads
        self.plan = Plan(tuple(layers), self.heads, (), 0)
        sha256 = weights_sha256(model)
        self.windows = FeatureStore(sha256, self.plan, folder)
        key = json.dumps([1, WHOLE, sha256, self.plan.layers, self.heads])
        self._whole = Kept(key, ["weights", "mass", "last", INSTRUCTION, DATA], folder)

    @cached_property
    def tokenizer(self) -> Any:
        return template_of(self.model)

    def fits(self, case: Case) -> bool:
        """Whether the engine takes it."""
        return len(self._offsets(case)[1]) < most_tokens(self.model) - 1

    def read(self, cases: Sequence[Case], sizes: Sequence[Windows], say: Callable[[str], None]) -> None:
        """What is not kept yet. Raises ``FeatureError``."""
        passes = {messages: None for case in cases for size in sizes for messages in _frozen(case, size)}
        rows = [
            Row(f"window {i}", "long", "", "held_out", "benign", messages=_thawed(one)) for i, one in enumerate(passes)
        ]
        whole = [case for case in cases if not self._whole.has(case.row.messages)]
        if not whole and all(self.windows.has(row.messages) for row in rows):
            return
        say(f"reading {len(whole)} whole documents and {len(rows)} windows, as far as they are not kept")
        with offline_reader(self.model, self.plan) as reader:
            for start in range(0, len(whole), AT_ONCE):
                self._read_whole(whole[start : start + AT_ONCE], reader)
                say(f"{start} of {len(whole)} whole documents")
            read_features(rows, self.windows, lambda: _Open(reader), lambda done: say(f"{done} of {len(rows)} windows"))

    def _read_whole(self, cases: Sequence[Case], reader: Any) -> None:
        captures = Captures(
            {f"last{layer}": HiddenCapture(layer=layer) for layer in self.plan.layers},
            {"a": AttentionCapture(heads=self.heads, spans=(INSTRUCTION, DATA), weights=True)},
        )
        specs = [spec_of(case.row.messages, [captures]) for case in cases]
        for case, readouts in zip(cases, reader.read([case.row.messages for case in cases], specs, 0), strict=True):
            attention = readouts.items["a"]
            states = [readouts.items[f"last{layer}"] for layer in self.plan.layers]
            if not isinstance(attention, AttentionReadout) or attention.weights is None:
                raise FeatureError(f"{case.row.named}: no attention on every token: {attention.reason}")
            last = [one.values for one in states if isinstance(one, HiddenReadout) and one.values is not None]
            if len(last) != len(states):
                raise FeatureError(f"{case.row.named}: hidden states are missing")
            arrays: dict[str, npt.NDArray[Any]] = {
                "weights": attention.weights.astype(np.float16),
                "mass": np.stack([attention.mass[INSTRUCTION], attention.mass[DATA]], axis=-1),
                "last": np.stack(last),
                INSTRUCTION: np.array(readouts.span_tokens[INSTRUCTION]),
                DATA: np.array(readouts.span_tokens[DATA]),
            }
            self._whole.put_arrays(case.row.messages, arrays)

    def whole(self, case: Case) -> Whole:
        """Raises ``FeatureError``."""
        found = self._whole.arrays(case.row.messages)
        if found is None:
            raise FeatureError(f"{case.row.named}: was not read")
        ranges = [tuple((int(a), int(b)) for a, b in found[name]) for name in (INSTRUCTION, DATA)]
        weights = found["weights"].astype(np.float32)
        return Whole(weights, found["mass"], found["last"], ranges[0], ranges[1], self._attack(case))

    def passes(self, case: Case, windows: Windows) -> list[ReadWindow]:
        """Raises ``FeatureError``."""
        instruction, texts = texts_in(case.row.messages)
        at = next(((i, text.find(case.attack)) for i, text in enumerate(texts) if case.attack in text), (0, 0))
        found = []
        for one in cut(texts, windows).windows:
            reading = self.windows.get(pass_messages(instruction, texts[one.text][one.start : one.end]))
            if reading is None:
                raise FeatureError(f"{case.row.named}: a window was not read")
            ends = min(one.end, at[1] + len(case.attack)), max(one.start, at[1])
            share = max(0, ends[0] - ends[1]) / len(case.attack) if case.attack and one.text == at[0] else 0.0
            found.append(ReadWindow(reading, share))
        return found

    def _attack(self, case: Case) -> tuple[int, int] | None:
        if not case.attack:
            return None
        text, offsets = self._offsets(case)
        start = text.index(case.attack)
        touched = [i for i, (a, b) in enumerate(offsets) if a < start + len(case.attack) and b > start]
        return touched[0], touched[-1] + 1

    def _offsets(self, case: Case) -> tuple[str, list[tuple[int, int]]]:
        messages = list(case.row.messages)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        return text, encoded["offset_mapping"]


@dataclass(frozen=True)
class _Open:
    """A reader that somebody else ends."""

    reader: Any

    def __enter__(self) -> Any:
        return self.reader

    def __exit__(self, *exc: object) -> None:
        return None


def _frozen(case: Case, windows: Windows) -> list[tuple[tuple[str, str], ...]]:
    """The conversations of its windows, as what can be a key."""
    instruction, texts = texts_in(case.row.messages)
    found = [texts[one.text][one.start : one.end] for one in cut(texts, windows).windows]
    return [tuple((one["role"], one["content"]) for one in pass_messages(instruction, window)) for window in found]


def _thawed(frozen: tuple[tuple[str, str], ...]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in frozen)
