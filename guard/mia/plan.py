"""What the scheduler hands on: one step's batch in, and out of it what the step will read and whose it is.

Owns these types. ``routing`` makes plans, ``readouts`` carries them out, ``assembly`` reads by their layouts. Of some a
step has hundreds: these are msgspec's structs, which are made and decoded in a fraction of a dataclass's time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from guard.mia.control import Words
from guard.mia.tracking import KeyStore


@dataclass(frozen=True)
class BatchView:
    """One step's batch, complete when constructed. Tokens of request i are rows ``starts[i]:starts[i + 1]``.

    starts: ``[requests + 1]`` int32, host. computed: ``[requests]`` int32, host: tokens of each request that earlier
    steps computed, so row ``starts[i] + j`` is the request's token ``computed[i] + j``. samples: ``[requests]`` bool,
    host: whether the step samples a token of the request. block_rows: ``[requests]`` int32, host: each request's row in
    the block tables; empty where keys are not read from vLLM's cache.
    """

    request_ids: list[str]
    starts: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]
    block_rows: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True)
class KeyChunk:
    """Rows from ``slots[layer]`` on of each layer's key tap hold the request's tokens ``start:start + length``."""

    store: KeyStore
    slots: dict[int, int]
    start: int
    length: int


class RowChunk(msgspec.Struct, frozen=True, gc=False):
    """Slots from ``slots[layer]`` on of a pool hold what a capture reads of the tokens ``start:start + length``.

    Of the query pool for attention and for queries, else of the hidden pool. ``columns``: a probe's among the logits of
    all. ``mass``: where the attention masses ``[length, heads, spans]`` begin, behind the logits. ``keys``: for
    queries, the tokens whose keys come with them; ``length`` may then be 0. ``keys_from``: the step's first token,
    which says what keys a window still shows.
    """

    capture: str
    slots: dict[int, int]
    start: int
    length: int
    columns: tuple[int, int] = (0, 0)
    mass: int = 0
    keys: tuple[int, int] = (0, 0)
    keys_from: int = 0


class SteerChunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Doses ``begin:end`` of the step belong to one request's steering ``index``.

    ``fresh``: from which on they are of tokens that no earlier step computed.
    """

    index: int
    begin: int
    fresh: int
    end: int


class RequestPlan(msgspec.Struct, gc=False, omit_defaults=True):
    """What a step does for one request.

    ``prompt_ended``: its last prompt token is in the step. ``again``: an earlier step has computed some of its tokens.
    ``block_row``: its row in the block tables. ``gates``: its
    gates' places in ``opened_at``, by steering. ``failed``: captures that cannot become complete any more, and why;
    ``shut``: the same of steerings whose gate cannot open.
    """

    rows: list[RowChunk] = []
    steer: list[SteerChunk] = []
    prompt_ended: bool = False
    again: bool = False
    block_row: int = 0
    gates: dict[int, int] = {}
    failed: dict[str, str] = {}
    shut: dict[int, str] = {}


class Base(NamedTuple):
    """The token, the hidden slot and the dose that a plan which stands for many steps counts from in one of them."""

    token: int = 0
    slot: int = 0
    dose: int = 0


@dataclass(frozen=True)
class StepLayout:
    """Where what a step reads lies in its record, and whose it is. Steps of a batch that only decodes share one.

    ``number``: of the engine's layouts, in order. ``bases``: of the requests whose plans stand for many steps; the
    others' count from 0. ``known``: those of them whose plans are what they were in the layout before. ``sent``: the
    hidden pool's slots that leave the device. ``logits``: values of probes, ``[slots, outputs of all probes]``;
    attention masses lie behind them. ``dose_limit``: a larger dose was shortened to it.
    """

    number: int
    requests: dict[str, RequestPlan]
    bases: dict[str, Base] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    sent: tuple[int, int] = (0, 0)
    logits: int = 0
    outputs: int = 0
    dose_limit: float = float("inf")


@dataclass
class StepPlan:
    """What to read after the step. ``offset``: all positions lie so many tokens beyond those of the layout.
    ``head_chunks``: those of attention and queries, with their requests. ``gated``:
    whether any request has gates. ``values``: whether anything is computed from what was gathered. ``masses``: values
    of attention; ``doses``: of steering. mass_entries, gate_entries: ``[n, words of one]``; ``span_words``: what masses
    refer to."""

    layout: StepLayout
    offset: int = 0
    key_chunks: list[KeyChunk] = field(default_factory=list)
    head_chunks: list[tuple[str, RowChunk]] = field(default_factory=list)
    gated: bool = False
    values: bool = False
    masses: int = 0
    doses: int = 0
    mass_entries: list[Words] = field(default_factory=list)
    span_words: list[int] = field(default_factory=list)
    gate_entries: list[tuple[int, ...]] = field(default_factory=list)
