"""The custom ops that sit in the model's forward pass: gather rows out of it, add steering vectors into it.

Each op is one block: docstring with shape, dtype and mutation of every argument, the reference, the fake, and the
registration. Imported only in processes that load a model. Counts live on the host, so no op waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.library import Library
from vllm.utils.torch_utils import direct_register_custom_op

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


def steer_rows(
    stream: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    coefficients: torch.Tensor,
    count: torch.Tensor,
    bank: torch.Tensor,
) -> None:
    """``stream[rows[i]] += coefficients[i] * bank[slots[i]]`` for ``i < count``; a row may occur several times.

    stream: ``[..., hidden_size]`` without gaps, the model's dtype, written; leading dimensions count as one, tokens.
    rows, slots: ``[capacity]`` int64, read. coefficients: ``[capacity]`` float32, read.
    count: ``[1]`` int64 on the host, read. bank: ``[vectors, hidden_size]`` float32, read.
    The product is rounded once, to the stream's dtype.
    """
    n = int(count)
    if n == 0:
        return
    delta = bank.index_select(0, slots[:n]) * coefficients[:n, None]
    stream.view(-1, stream.shape[-1]).index_add_(0, rows[:n], delta.to(stream.dtype))


def _steer_rows_fake(
    stream: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    coefficients: torch.Tensor,
    count: torch.Tensor,
    bank: torch.Tensor,
) -> None:
    return


def _register(name: str, op: Callable[..., None], fake: Callable[..., None], mutates: list[str]) -> None:
    if not hasattr(torch.ops.mia, name):
        direct_register_custom_op(name, op, mutates_args=mutates, fake_impl=fake, target_lib=_library)


_register("gather_rows", gather_rows, _gather_rows_fake, ["out"])
_register("steer_rows", steer_rows, _steer_rows_fake, ["stream"])
