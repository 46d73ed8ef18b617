"""The ops as Triton kernels, each beside its launcher, and the attention mass read from vLLM's key cache.

Launchers have the names and arguments of ``ops`` and check types and strides. The grids of ``gather_rows`` and
``steer_rows`` follow from the shapes alone, so that a captured graph has them fixed: programs walk over the entries,
whose number each reads from the control block. Imported only where Triton runs: on CUDA, or in Triton's interpreter.
Fields of an entry are named by their offsets here; what they mean stands in ``ops``.
"""

# Triton has no types of its own, and a kernel's arguments are pointers and numbers that it types itself.
# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from guard.mia.control import spared

MOST_PROGRAMS = 512
"""Programs of one launch: a few for each multiprocessor of a large GPU, and soon gone when there is nothing to do."""

MASS_TILE = 32768
"""Elements of the tile of keys, tokens times head size, that ``span_mass`` holds at a time."""

MASS_WARPS = 16
"""Warps that share a tile: a program has to read a whole context by itself, and is as fast as its loads are many."""

JUDGED_ROWS = 128
"""Rows that ``judge_gates`` looks at together."""

LAYER_FIELDS = 9
"""Columns of the layers' table: see ``span_mass``."""

# As in ``ops``, which a test compares. Importing it from here would be a circle.
_PROJECT = tl.constexpr(1)
_REPLACE = tl.constexpr(2)
_SHUT = tl.constexpr(2**31 - 1)
_HELD_BACK = tl.constexpr(-1.0)
_FIRST_PART = tl.constexpr(1)
_LAST_PART = tl.constexpr(2)
_LEAST_RELATIVE_NORM = tl.constexpr(1e-4)
_LEAST_NORM = tl.constexpr(1e-12)
_GATHER_WORDS = tl.constexpr(2)
_STEER_ROW_WORDS = tl.constexpr(3)
_STEER_PASS_WORDS = tl.constexpr(8)
_MASS_WORDS = tl.constexpr(8)
_GATE_WORDS = tl.constexpr(11)

_LAYER_FIELDS = tl.constexpr(LAYER_FIELDS)
_LOWEST = tl.constexpr(-3.0e38)

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _float(word):
    """A float32 in the control block."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def _row(row, per_outer, outer_stride, inner_stride):
    """Where a row begins in a tensor whose outer index has ``per_outer`` rows."""
    return (row // per_outer).to(tl.int64) * outer_stride + (row % per_outer).to(tl.int64) * inner_stride


@triton.jit(do_not_specialize=["tap"])
def _gather_rows(
    source,
    source_per_outer,
    source_outer,
    source_inner,
    addend,
    addend_per_outer,
    addend_outer,
    addend_inner,
    control,
    tap,
    out,
    out_stride,
    width,
    has_addend: tl.constexpr,
    block: tl.constexpr,
):
    begin, count = tl.load(control + 2 * tap), tl.load(control + 2 * tap + 1)
    column = tl.arange(0, block)
    inside = column < width
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = control + begin + i * _GATHER_WORDS
        row, slot = tl.load(entry), tl.load(entry + 1)
        value = tl.load(source + _row(row, source_per_outer, source_outer, source_inner) + column, inside)
        if has_addend:
            other = tl.load(addend + _row(row, addend_per_outer, addend_outer, addend_inner) + column, inside)
            value = value.to(tl.float32) + other.to(tl.float32)
        tl.store(out + slot.to(tl.int64) * out_stride + column, value.to(out.dtype.element_ty), inside)


def gather_rows(
    source: torch.Tensor, addend: torch.Tensor | None, control: torch.Tensor, tap: int, out: torch.Tensor
) -> None:
    """As ``ops.gather_rows``. Neither source nor addend is copied where a row of it has no gaps."""
    if spared(control, tap):
        return
    width = out.shape[1]
    _check(control, torch.int32)
    if out.stride(1) != 1 or out.dtype != source.dtype:
        raise ValueError(f"rows of {source.dtype} cannot be gathered into {out.dtype} with strides {out.stride()}")
    there = _rows_of(source, width)
    other = there if addend is None else _rows_of(addend, width)
    block = _block(width)
    _gather_rows[_programs(source.numel() // width),](
        *there, *other, control, tap, out, out.stride(0), width, addend is not None, block, num_warps=_warps(block)
    )


@triton.jit
def _norm(row):
    return tl.sqrt(tl.sum(row * row, axis=0))


@triton.jit(do_not_specialize=["tap"])
def _steer_rows(
    hidden,
    hidden_per_outer,
    hidden_outer,
    hidden_inner,
    residual,
    residual_per_outer,
    residual_outer,
    residual_inner,
    control,
    tap,
    bank,
    dose_limit,
    opened_at,
    doses,
    width,
    has_residual: tl.constexpr,
    block: tl.constexpr,
):
    begin, count = tl.load(control + 2 * tap), tl.load(control + 2 * tap + 1)
    column = tl.arange(0, block)
    inside = column < width
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = control + begin + i * _STEER_ROW_WORDS
        row, first, passes = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        there = hidden + _row(row, hidden_per_outer, hidden_outer, hidden_inner) + column
        start = tl.load(there, inside, other=0.0).to(tl.float32)
        if has_residual:
            other = residual + _row(row, residual_per_outer, residual_outer, residual_inner) + column
            start += tl.load(other, inside, other=0.0).to(tl.float32)
        start_norm = tl.maximum(_norm(start), _LEAST_NORM)
        limit = tl.load(dose_limit)
        total = tl.zeros([block], tl.float32)
        acted = 0
        for p in range(passes):
            step = control + first + p * _STEER_PASS_WORDS
            mode, keep_norm, gate, dose_at = tl.load(step + 1), tl.load(step + 4), tl.load(step + 5), tl.load(step + 7)
            opens_from = tl.load(opened_at + gate, mask=gate >= 0, other=-_SHUT)
            if tl.load(step + 6) >= opens_from:
                vector = tl.load(bank + tl.load(step).to(tl.int64) * width + column, inside, other=0.0)
                scale = _float(step + 2)
                before = start + total
                if mode == _PROJECT:
                    unit = vector / tl.maximum(_norm(vector), _LEAST_NORM)
                    change = scale * (_float(step + 3) - tl.sum(before * unit, axis=0)) * unit
                elif mode == _REPLACE:
                    change = scale * vector - before
                else:
                    change = scale * vector
                if keep_norm != 0:
                    after = before + change
                    old, new = _norm(before), _norm(after)
                    if new > _LEAST_RELATIVE_NORM * old:
                        change = after * (old / new) - before
                total += change
                dose = _norm(total) / start_norm
                tl.store(doses + dose_at, dose)
                if dose > limit:
                    total *= limit / dose
                acted = 1
            else:
                tl.store(doses + dose_at, _HELD_BACK)
        if acted != 0:
            value = tl.load(there, inside).to(tl.float32) + total
            tl.store(there, value.to(hidden.dtype.element_ty), inside)


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
    """As ``ops.steer_rows``; everything between reading a row and writing it stays in registers."""
    if spared(control, tap):
        return
    width = hidden.shape[-1]
    _check(control, torch.int32)
    _check(bank, torch.float32)
    _check(opened_at, torch.int32)
    _check(doses, torch.float32)
    there = _rows_of(hidden, width)
    if there[0] is not hidden:
        raise ValueError(f"a stream of shape {tuple(hidden.shape)} with strides {hidden.stride()} cannot be written to")
    other = there if residual is None else _rows_of(residual, width)
    block = _block(width)
    _steer_rows[_programs(hidden.numel() // width),](
        *there,
        *other,
        control,
        tap,
        bank,
        dose_limit,
        opened_at,
        doses,
        width,
        residual is not None,
        block,
        num_warps=_warps(block),
    )


@triton.jit
def _logits(query, keys, table, block_size, block_stride, token_stride, column, head_size, scale, softcap, tokens, end):
    """Attention logits of one query at ``tokens``, and -inf from ``end`` on. keys: the key head in the first block."""
    wanted = tokens < end
    nth = tokens // block_size
    blocks = tl.load(table + nth, wanted, other=0)
    begins = blocks.to(tl.int64) * block_stride + (tokens - nth * block_size) * token_stride
    inside = wanted[:, None] & (column < head_size)[None, :]
    key = tl.load(keys + begins[:, None] + column[None, :], inside, other=0.0).to(tl.float32)
    logits = tl.sum(key * query[None, :], axis=1) * scale
    if softcap > 0:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logits = softcap * (2 / (1 + tl.exp(-2 * logits / softcap)) - 1)
    return tl.where(wanted, logits, -float("inf"))


@triton.jit(do_not_specialize=["tap"])
def _span_mass(
    queries,
    query_stride,
    control,
    tap,
    layers,
    scales,
    values,
    key_type: tl.constexpr,
    head_block: tl.constexpr,
    token_block: tl.constexpr,
):
    entry = control + tl.load(control + 2 * tap) + tl.program_id(0) * _MASS_WORDS
    layer, end = tl.load(entry + 1), tl.load(entry + 4) + 1
    fields = layers + layer * _LAYER_FIELDS
    # Head sizes are multiples of 8, and so are the strides; told so, the compiler loads 8 elements at a time.
    block_stride, token_stride = tl.multiple_of(tl.load(fields + 1), 8), tl.multiple_of(tl.load(fields + 3), 8)
    to_head = tl.load(entry + 2) * tl.multiple_of(tl.load(fields + 2), 8)
    keys = tl.multiple_of(tl.load(fields).to(tl.pointer_type(key_type)), 16) + to_head
    table = tl.load(fields + 4).to(tl.pointer_type(tl.int32)) + tl.load(entry + 3) * tl.load(fields + 5)
    block_size, window = tl.load(fields + 6).to(tl.int32), tl.load(fields + 7).to(tl.int32)
    head_size = tl.multiple_of(tl.load(fields + 8).to(tl.int32), 8)
    scale, softcap = tl.load(scales + 2 * layer), tl.load(scales + 2 * layer + 1)
    column = tl.arange(0, head_block)
    query = queries + tl.load(entry).to(tl.int64) * query_stride + column
    q = tl.load(query, column < head_size, other=0.0).to(tl.float32)
    begin = 0
    if window > 0:
        begin = tl.maximum(end - window, 0)

    tile = tl.arange(0, token_block)
    # Each lane has its own maximum, and the sum of exponentials below it.
    highest, summed = tl.full([token_block], _LOWEST, tl.float32), tl.zeros([token_block], tl.float32)
    for t in range(begin, end, token_block):
        x = _logits(
            q, keys, table, block_size, block_stride, token_stride, column, head_size, scale, softcap, t + tile, end
        )
        higher = tl.maximum(highest, x)
        summed = summed * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    most = tl.max(highest, axis=0)
    whole = most + tl.log(tl.sum(summed * tl.exp(highest - most), axis=0))

    ranges, spans, out = control + tl.load(entry + 5), tl.load(entry + 6), tl.load(entry + 7)
    for span in range(spans):
        n = tl.load(ranges)
        mass = tl.zeros([token_block], tl.float32)
        for i in range(n):
            first = tl.maximum(tl.load(ranges + 1 + 2 * i), begin)
            last = tl.minimum(tl.load(ranges + 2 + 2 * i), end)
            for t in range(first, last, token_block):
                x = _logits(
                    q,
                    keys,
                    table,
                    block_size,
                    block_stride,
                    token_stride,
                    column,
                    head_size,
                    scale,
                    softcap,
                    t + tile,
                    last,
                )
                mass += tl.exp(x - whole)
        tl.store(values + out + span, tl.sum(mass, axis=0))
        ranges += 1 + 2 * n


def span_mass(
    queries: torch.Tensor,
    control: torch.Tensor,
    tap: int,
    entries: int,
    layers: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    kv_dtype: torch.dtype,
) -> None:
    """For every ``MassEntry`` of the tap, the softmax attention of its query on each of its spans.

    queries: ``[capacity, largest head size]``, the model's dtype, read. control: ``[words]`` int32, read. entries: how
    many the tap has, as in its header. layers: ``[layers, LAYER_FIELDS]`` int64, read: address of the key cache
    (``[blocks, key heads, block size, ...]`` of ``kv_dtype``, a key being the first ``head size`` elements of the last
    dimension), its block, head and token strides in elements, address of the block table (``[requests, blocks]``
    int32), its row stride, block size in tokens, sliding window in tokens or 0, head size. scales: ``[layers, 2]``
    float32, read: what multiplies a logit, and its soft cap or 0. values: ``[n]`` float32, written. Head sizes and
    strides of the cache are multiples of 8, its address of 16 bytes.
    A token sees those up to its own position, within the window. Computed in float32; nothing of it is cached.
    """
    if not entries:
        return
    _check(control, torch.int32)
    _check(layers, torch.int64)
    _check(scales, torch.float32)
    _check(values, torch.float32)
    if queries.stride(1) != 1:
        raise ValueError(f"queries have strides {queries.stride()}, where the last must be 1")
    block = _block(queries.shape[1])
    tokens = max(16, MASS_TILE // block)
    _span_mass[entries,](
        queries,
        queries.stride(0),
        control,
        tap,
        layers,
        scales,
        values,
        _TYPES[kv_dtype],
        block,
        tokens,
        num_warps=MASS_WARPS,
    )


@triton.jit(do_not_specialize=["tap"])
def _judge_gates(values, control, tap, opened_at, sums, block: tl.constexpr):
    entry = control + tl.load(control + 2 * tap) + tl.program_id(0) * _GATE_WORDS
    gate, first, rows, columns = tl.load(entry), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 5)
    row_stride, column_stride = tl.load(entry + 4), tl.load(entry + 6)
    threshold, above = _float(entry + 7), tl.load(entry + 8)
    mean_over, flags = tl.load(entry + 9), tl.load(entry + 10)
    so_far = 0.0
    crossings = 0
    for begin in range(0, rows, block):
        row = begin + tl.arange(0, block)
        inside = row < rows
        mean = tl.zeros([block], tl.float32)
        for column in range(columns):
            mean += tl.load(values + first + row * row_stride + column * column_stride, inside, other=0.0)
        mean /= columns
        so_far += tl.sum(mean, axis=0)
        crossed = tl.where(above != 0, mean > threshold, mean < threshold) & inside
        crossings += tl.sum(crossed.to(tl.int32), axis=0)
    if mean_over > 0:
        if (flags & _FIRST_PART) == 0:
            so_far += tl.load(sums + gate)
        tl.store(sums + gate, so_far)
        mean_of_all = so_far / mean_over
        crossed_at_last = tl.where(above != 0, mean_of_all > threshold, mean_of_all < threshold)
        crossings = (crossed_at_last & ((flags & _LAST_PART) != 0)).to(tl.int32)
    if crossings > 0 and tl.load(opened_at + gate) == _SHUT:
        tl.store(opened_at + gate, tl.load(entry + 1))


def judge_gates(
    values: torch.Tensor, control: torch.Tensor, tap: int, entries: int, opened_at: torch.Tensor, sums: torch.Tensor
) -> None:
    """As ``ops.judge_gates``: one program for each entry, so that none has to wait for another."""
    if not entries:
        return
    _check(values, torch.float32)
    _check(control, torch.int32)
    _check(opened_at, torch.int32)
    _check(sums, torch.float32)
    _judge_gates[entries,](values, control, tap, opened_at, sums, JUDGED_ROWS, num_warps=4)


def _check(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"a tensor of {dtype} without gaps is needed, not {tensor.dtype} with {tensor.stride()}")


def _rows_of(tensor: torch.Tensor, width: int) -> tuple[torch.Tensor, int, int, int]:
    """A tensor as rows of ``width``: itself, rows in each outer index, strides of the outer index and of a row in it.

    Queries and keys are often parts of one wider tensor, whose tokens lie apart.
    """
    if tensor.is_contiguous():
        return tensor, 1, width, 0
    if tensor.stride(-1) == 1:
        if tensor.dim() == 2:
            return tensor, tensor.shape[1] // width, tensor.stride(0), width
        if tensor.dim() == 3 and tensor.shape[2] == width:
            return tensor, tensor.shape[1], tensor.stride(0), tensor.stride(1)
    return tensor.reshape(-1, width), 1, width, 0


def _programs(rows: int) -> int:
    return min(max(rows, 1), MOST_PROGRAMS)


def _block(width: int) -> int:
    """The next power of two."""
    return 1 << (width - 1).bit_length()


def _warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16
