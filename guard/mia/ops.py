"""The custom ops that sit in the model's forward pass: gather rows out of it, add steering vectors into it.

Each op is one block: docstring with shape, dtype and mutation of every argument, the reference, the fake, and the
registration. Imported only in processes that load a model. Counts live on the host, so no op waits for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

ADD, PROJECT, REPLACE = 0, 1, 2
"""Modes of ``steer_rows``. Ablation is projection on target 0."""

NO_GATE = -1
"""In place of a gate: the pass always acts."""

SHUT = 2**31 - 1
"""In ``opened_at``: a gate that has not opened. No token has this position."""

HELD_BACK = -1.0
"""In ``doses``: the pass's gate was shut."""

FIRST_PART, LAST_PART = 1, 2
"""Flags of a ``GateEntry``: its sum starts at 0; its sum is complete and judged."""


class GatherEntry(NamedTuple):
    """One row of a source, and the row of the tap's output that becomes its copy."""

    row: int
    slot: int


class SteerRow(NamedTuple):
    """One row of the stream, and where its ``passes`` passes lie: at the word ``first``. A row comes once in a tap."""

    row: int
    first: int
    passes: int


class SteerPass(NamedTuple):
    """One steering of one row. ``vector`` is a row of the bank; ``gate`` one of ``opened_at``, or ``NO_GATE``;
    ``position`` the token's; ``dose`` one of ``doses``."""

    vector: int
    mode: int
    coefficient_bits: int
    target_bits: int
    keep_norm: int
    gate: int
    position: int
    dose: int


class MassEntry(NamedTuple):
    """One head of one token whose attention to spans is wanted.

    ``query`` is a row of the queries, ``layer`` of the layers' table, ``request`` of its block table. At the word
    ``spans`` each of ``span_count`` spans has one word n and then n pairs start, end: half open ranges of tokens, in
    order, none touching another. ``out`` is where in ``values`` the first span's mass goes; the others follow.
    """

    query: int
    layer: int
    key_head: int
    request: int
    position: int
    spans: int
    span_count: int
    out: int


class GateEntry(NamedTuple):
    """What one gate judges after a step: ``rows`` x ``columns`` numbers of ``values`` from ``first`` on.

    With ``mean_over`` 0 each row's mean over its columns is judged by itself. Otherwise the rows' means are added to
    the gate's sum, over as many steps as it takes, and the sum is judged once, divided by ``mean_over``: ``flags`` has
    ``FIRST_PART`` and ``LAST_PART``. ``above`` 1: opens for a greater value than the threshold; 0: for a smaller one.
    """

    gate: int
    opens_from: int
    first: int
    rows: int
    row_stride: int
    columns: int
    column_stride: int
    threshold_bits: int
    above: int
    mean_over: int
    flags: int


HEADER_WORDS = 2
GATHER_WORDS = len(GatherEntry._fields)
STEER_ROW_WORDS = len(SteerRow._fields)
STEER_PASS_WORDS = len(SteerPass._fields)
MASS_WORDS = len(MassEntry._fields)
GATE_WORDS = len(GateEntry._fields)
"""Words of the control block: a tap's header, and one entry of each kind."""


_library = Library("mia", "FRAGMENT")  # type: ignore[no-untyped-call]


def gather_rows(
    source: torch.Tensor, addend: torch.Tensor | None, rows: torch.Tensor, count: torch.Tensor, out: torch.Tensor
) -> None:
    """``out[i] = source[rows[i]] + addend[rows[i]]`` for ``i < count``.

    source, addend: ``[..., width]``, the model's dtype, read; leading dimensions count as one, tokens.
    rows: ``[capacity]`` int64, read. count: ``[1]`` int64 on the host, read.
    out: ``[capacity, width]``, written; rows from ``count`` on stay.
    """
    n = int(count)
    if n == 0:
        return
    wanted = rows[:n]
    torch.index_select(source.reshape(-1, out.shape[1]), 0, wanted, out=out[:n])
    if addend is not None:
        out[:n] += addend.reshape(-1, out.shape[1]).index_select(0, wanted)


def _gather_rows_fake(
    source: torch.Tensor, addend: torch.Tensor | None, rows: torch.Tensor, count: torch.Tensor, out: torch.Tensor
) -> None:
    return


LEAST_RELATIVE_NORM = 1e-4
"""A steered row shorter than this part of what it was has only rounding left, and no direction to keep a norm in."""


def steer_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    slots: torch.Tensor,
    modes: torch.Tensor,
    coefficients: torch.Tensor,
    targets: torch.Tensor,
    keep_norm: torch.Tensor,
    bounds: torch.Tensor,
    bank: torch.Tensor,
    dose_limit: torch.Tensor,
    doses: torch.Tensor,
) -> None:
    """Change rows of the stream ``hidden + residual`` by writing to ``hidden``, in passes one after the other.

    hidden: ``[..., hidden_size]`` without gaps, the model's dtype, written; residual: the same or None, read; leading
    dimensions count as one, tokens. rows, slots: ``[capacity]`` int64, read. modes: ``[capacity]`` int64, read.
    coefficients, targets: ``[capacity]`` float32, read. keep_norm: ``[capacity]`` bool, read.
    bounds: ``[passes + 1]`` int64 on the host, read: pass p has entries ``bounds[p]:bounds[p + 1]``, each of another
    row. bank: ``[vectors, hidden_size]`` float32, read. dose_limit: ``[1]`` float32, read: most of ``|change| /
    |stream|`` that all passes together may make of a row; a stronger change is shortened to it. doses: ``[capacity]``
    float32, written: what the passes up to each entry's asked for. The change is computed in float32 and rounded once.
    """
    flat = hidden.view(-1, hidden.shape[-1])
    addend = None if residual is None else residual.reshape(flat.shape)
    limits = bounds.tolist()

    def stream(wanted: torch.Tensor) -> torch.Tensor:
        there = flat.index_select(0, wanted).float()
        return there if addend is None else there + addend.index_select(0, wanted).float()

    untouched = stream(rows[: limits[-1]])
    for begin, end in itertools.pairwise(limits):
        if begin == end:
            continue
        part = slice(begin, end)
        wanted, start = rows[part], untouched[part]
        before = stream(wanted) if begin else start
        vectors = bank.index_select(0, slots[part])
        change = _change(before, vectors, coefficients[part, None], modes[part, None], targets[part, None])
        after = before + change
        old, new = before.norm(dim=1, keepdim=True), after.norm(dim=1, keepdim=True)
        has_direction = new > LEAST_RELATIVE_NORM * old
        change = torch.where(keep_norm[part, None] & has_direction, after * (old / new) - before, change)
        total = before + change - start if begin else change
        dose = total.norm(dim=1, keepdim=True) / start.norm(dim=1, keepdim=True).clamp_min(1e-12)
        doses[part] = dose[:, 0]
        change = torch.where(dose > dose_limit, start + total * (dose_limit / dose) - before, change)
        flat.index_add_(0, wanted, change.to(flat.dtype))


def _change(
    before: torch.Tensor, vectors: torch.Tensor, scale: torch.Tensor, modes: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """What each row's mode adds. before, vectors: ``[n, hidden_size]``; scale, modes, targets: ``[n, 1]``."""
    unit = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)
    projected = scale * (targets - (before * unit).sum(dim=1, keepdim=True)) * unit
    replaced = scale * vectors - before
    return torch.where(modes == PROJECT, projected, torch.where(modes == REPLACE, replaced, scale * vectors))


def _steer_rows_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    rows: torch.Tensor,
    slots: torch.Tensor,
    modes: torch.Tensor,
    coefficients: torch.Tensor,
    targets: torch.Tensor,
    keep_norm: torch.Tensor,
    bounds: torch.Tensor,
    bank: torch.Tensor,
    dose_limit: torch.Tensor,
    doses: torch.Tensor,
) -> None:
    return


def _register(name: str, op: Callable[..., None], fake: Callable[..., None], mutates: list[str]) -> None:
    if not hasattr(torch.ops.mia, name):
        direct_register_custom_op(name, op, mutates_args=mutates, fake_impl=fake, target_lib=_library)


_register("gather_rows", gather_rows, _gather_rows_fake, ["out"])
_register("steer_rows", steer_rows, _steer_rows_fake, ["hidden", "doses"])
