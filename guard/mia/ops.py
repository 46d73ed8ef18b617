"""The custom ops beside the model's forward pass, and the words of the control block that tells them what to do.

A step's work stands in one int32 tensor, the control block, and is read from there where the op runs: nothing is read
on the host, so that the two ops inside the forward pass, ``gather_rows`` and ``steer_rows``, can be captured in a CUDA
graph. At its start lies a header of ``HEADER_WORDS`` for each tap: the word at which the tap's entries begin, and how
many there are. A float is stored by its bits; a row or slot that no entry names is neither read nor written.

Each op is one block: docstring with shape, dtype and mutation of every argument, the plain reference for the CPU, the
fake, and the registration. On CUDA ``kernels`` stands in under the same name. Imported only in processes that load a
model. Never touches requests or batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.library import Library
from vllm.platforms import current_platform
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


LEAST_RELATIVE_NORM = 1e-4
"""A steered row shorter than this part of what it was has only rounding left, and no direction to keep a norm in."""

LEAST_NORM = 1e-12
"""What stands in for the norm of a shorter vector where a norm divides."""

_Words = npt.NDArray[np.int32]

_library = Library("mia", "FRAGMENT")  # type: ignore[no-untyped-call]


def _register(name: str, reference: Callable[..., None], fake: Callable[..., None], mutates: list[str]) -> None:
    """The reference for tensors on the CPU, the kernel for those on a GPU; in Triton's interpreter for both."""
    if hasattr(torch.ops.mia, name):
        return
    on_cpu = reference
    if os.environ.get("TRITON_INTERPRET") == "1":
        on_cpu = _kernel(name)
    direct_register_custom_op(name, on_cpu, mutates, fake, _library, dispatch_key="CPU")
    if current_platform.is_cuda_alike():
        _library.impl(name, _kernel(name), dispatch_key="CUDA")  # type: ignore[no-untyped-call]


def _kernel(name: str) -> Callable[..., None]:
    from guard.mia import kernels  # needs Triton, which a CPU need not have

    launcher: Callable[..., None] = getattr(kernels, name)
    return launcher


def _entries(control: torch.Tensor, tap: int, words: int) -> tuple[_Words, _Words]:
    """The whole control block, and of it the entries of one tap: ``[count, words]``."""
    block: _Words = control.numpy()
    begin, count = block[HEADER_WORDS * tap : HEADER_WORDS * (tap + 1)]
    return block, block[begin : begin + count * words].reshape(count, words)


def _column(entries: _Words, field: int) -> torch.Tensor:
    """One field of all entries as indices."""
    return torch.from_numpy(entries[:, field].astype(np.int64))


def _floats(entries: _Words, field: int) -> torch.Tensor:
    """One field of all entries as the floats whose bits it has: ``[n, 1]``."""
    return torch.from_numpy(entries[:, field].copy().view(np.float32))[:, None]


def gather_rows(
    source: torch.Tensor, addend: torch.Tensor | None, control: torch.Tensor, tap: int, out: torch.Tensor
) -> None:
    """``out[slot] = source[row] + addend[row]`` for every ``GatherEntry`` of the tap.

    source, addend: ``[..., n * width]``, the model's dtype, read as rows of ``width``; addend may be None.
    control: ``[words]`` int32, read. out: ``[capacity, width]``, the model's dtype, written; a gap between its rows is
    allowed. The sum is rounded once.
    """
    _, entries = _entries(control, tap, GATHER_WORDS)
    if len(entries) == 0:
        return
    rows = _column(entries, 0)
    taken = source.reshape(-1, out.shape[1]).index_select(0, rows)
    if addend is not None:
        taken += addend.reshape(-1, out.shape[1]).index_select(0, rows)
    out.index_copy_(0, _column(entries, 1), taken)


def _gather_rows_fake(
    source: torch.Tensor, addend: torch.Tensor | None, control: torch.Tensor, tap: int, out: torch.Tensor
) -> None:
    return


_register("gather_rows", gather_rows, _gather_rows_fake, ["out"])


def steer_rows(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    control: torch.Tensor,
    tap: int,
    bank: torch.Tensor,
    dose_limit: torch.Tensor,
    opened_at: torch.Tensor,
    doses: torch.Tensor,
) -> None:
    """Change rows of the stream ``hidden + residual`` by writing to ``hidden``: for every ``SteerRow`` of the tap its
    passes, one after the other.

    hidden: ``[..., hidden_size]``, the model's dtype, written; residual: the same or None, read; leading dimensions
    count as one, tokens. control: ``[words]`` int32, read. bank: ``[vectors, hidden_size]`` float32, read.
    dose_limit: ``[1]`` float32, read: most of ``|change| / |stream|`` that a row's passes together may make; a stronger
    change is shortened to it. opened_at: ``[gates]`` int32, read: from which token position on a gate lets a pass act,
    or ``SHUT``. doses: ``[n]`` float32, written: what the passes up to each asked for, or ``HELD_BACK``.
    The change is computed in float32 and rounded once; a row none of whose passes acted stays as it is.
    """
    block, entries = _entries(control, tap, STEER_ROW_WORDS)
    if len(entries) == 0:
        return
    rows = _column(entries, 0)
    flat = hidden.view(-1, hidden.shape[-1])
    there = flat.index_select(0, rows).float()
    start = there if residual is None else there + residual.reshape(flat.shape).index_select(0, rows).float()
    total = torch.zeros_like(start)
    acted = torch.zeros(len(entries), dtype=torch.bool)
    _, firsts, passes = entries.T
    for done in range(passes.max()):
        having = np.flatnonzero(passes > done)
        step = block[firsts[having, None] + done * STEER_PASS_WORDS + np.arange(STEER_PASS_WORDS)]
        acting = _acts(step, opened_at.numpy())
        doses[_column(step[~acting], 7)] = HELD_BACK
        if not acting.any():
            continue
        step, those = step[acting], torch.from_numpy(having[acting])
        total[those], doses[_column(step, 7)] = _pass(step, start[those], total[those], bank, dose_limit)
        acted[those] = True
    flat[rows[acted]] = (there + total)[acted].to(flat.dtype)


def _acts(step: _Words, opened_at: _Words) -> npt.NDArray[np.bool_]:
    """Which passes have no gate, or one that is open at their token's position."""
    gates, positions = step[:, 5], step[:, 6]
    acting: npt.NDArray[np.bool_] = gates == NO_GATE
    gated = ~acting
    acting[gated] = positions[gated] >= opened_at[gates[gated]]
    return acting


def _pass(
    step: _Words, start: torch.Tensor, total: torch.Tensor, bank: torch.Tensor, dose_limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What rows have been changed by in all after one more pass each, within the limit, and the dose without it.

    start: the untouched stream; total: the change so far; both ``[n, hidden_size]`` float32.
    """
    before = start + total
    modes, keep_norm = _column(step, 1)[:, None], _column(step, 4)[:, None] == 1
    change = _change(before, bank.index_select(0, _column(step, 0)), _floats(step, 2), modes, _floats(step, 3))
    after = before + change
    old, new = before.norm(dim=1, keepdim=True), after.norm(dim=1, keepdim=True)
    has_direction = new > LEAST_RELATIVE_NORM * old
    change = torch.where(keep_norm & has_direction, after * (old / new) - before, change)
    total = total + change
    dose = total.norm(dim=1, keepdim=True) / start.norm(dim=1, keepdim=True).clamp_min(LEAST_NORM)
    return torch.where(dose > dose_limit, total * (dose_limit / dose), total), dose[:, 0]


def _change(
    before: torch.Tensor, vectors: torch.Tensor, scale: torch.Tensor, modes: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """What each row's mode adds. before, vectors: ``[n, hidden_size]``; scale, modes, targets: ``[n, 1]``."""
    unit = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(LEAST_NORM)
    projected = scale * (targets - (before * unit).sum(dim=1, keepdim=True)) * unit
    replaced = scale * vectors - before
    return torch.where(modes == PROJECT, projected, torch.where(modes == REPLACE, replaced, scale * vectors))


def _steer_rows_fake(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    control: torch.Tensor,
    tap: int,
    bank: torch.Tensor,
    dose_limit: torch.Tensor,
    opened_at: torch.Tensor,
    doses: torch.Tensor,
) -> None:
    return


_register("steer_rows", steer_rows, _steer_rows_fake, ["hidden", "doses"])


def judge_gates(
    values: torch.Tensor, control: torch.Tensor, tap: int, entries: int, opened_at: torch.Tensor, sums: torch.Tensor
) -> None:
    """Open the gates that a step's values cross: ``opened_at[gate] = opens_from`` for every ``GateEntry`` that does.

    values: ``[n]`` float32, read. control: ``[words]`` int32, read. entries: how many the tap has, as in its header;
    known on the host, since this op runs after the forward pass. opened_at: ``[gates]`` int32, written where a shut
    gate opens; an open one stays as it is. sums: ``[gates]`` float32, written: running sums of the means of
    ``mean_over`` rows. NaN opens nothing.
    """
    for words in _entries(control, tap, GATE_WORDS)[1][:entries]:
        entry = GateEntry(*words.tolist())
        rows = entry.first + torch.arange(entry.rows)[:, None] * entry.row_stride
        judged = values[rows + torch.arange(entry.columns) * entry.column_stride].mean(dim=1)
        if entry.mean_over:
            so_far = judged.sum() if entry.flags & FIRST_PART else sums[entry.gate] + judged.sum()
            sums[entry.gate] = so_far
            judged = so_far / entry.mean_over
            if not entry.flags & LAST_PART:
                continue
        threshold = _floats(words[None], 7)
        crossed = judged > threshold if entry.above else judged < threshold
        if crossed.any() and opened_at[entry.gate] == SHUT:
            opened_at[entry.gate] = entry.opens_from


def _judge_gates_fake(
    values: torch.Tensor, control: torch.Tensor, tap: int, entries: int, opened_at: torch.Tensor, sums: torch.Tensor
) -> None:
    return


_register("judge_gates", judge_gates, _judge_gates_fake, ["opened_at", "sums"])
