"""Finds the decoder layers and their attention in a loaded model, and inserts the ops there.

Owns what a "layer" is and where its output is whole. Works on any vLLM model whose decoder is one ``ModuleList`` of
blocks with one attention each, and refuses the rest with the reason. Never touches requests or batches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.transformers.base import Base as TransformersBase
from vllm.v1.attention.backend import AttentionType

from guard.mia import ops as _ops  # noqa: F401  (registers torch.ops.mia)
from guard.mia.buffers import AttentionShape, GatherTap, SteerTap, TapBuffers

EMBEDDING = 0
"""Layer number of the embedding: the stream on its way into the first block."""

STREAM_ARGUMENT = "hidden_states"
"""What vLLM's and transformers' decoder blocks call the stream."""


class UnsupportedModelError(RuntimeError):
    """The model cannot be tapped exactly; the message says why."""


@dataclass(frozen=True)
class Decoder:
    """Blocks and their attention by layer number, counted from 1 as in transformers' ``hidden_states``.

    ``returns_residual``: a block that returns a tuple returns (hidden, residual) and the stream is their sum; else its
    first element alone is the stream.
    """

    blocks: dict[int, nn.Module]
    attention: dict[int, Attention]
    returns_residual: bool


def find_decoder(model: nn.Module) -> Decoder:
    """Locate the decoder blocks. Raises ``UnsupportedModelError``."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    candidates = [(blocks, attention) for blocks in lists if (attention := _attention_per_block(blocks))]
    candidates += _transformers_backend(model, lists)
    if len(candidates) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(candidates)} lists of decoder blocks with one attention each; taps need "
            "exactly one (encoder-decoder, MLA and linear-attention models are not supported)"
        )
    ((blocks, attention),) = candidates
    return Decoder(
        blocks=dict(enumerate(blocks, start=1)),
        attention=dict(enumerate(attention, start=1)),
        returns_residual=not isinstance(model, TransformersBase),
    )


def _transformers_backend(model: nn.Module, lists: list[nn.ModuleList]) -> list[tuple[nn.ModuleList, list[Attention]]]:
    """Decoders of models that vLLM runs through transformers' own code: their attention lies outside the blocks."""
    if not isinstance(model, TransformersBase):
        return []
    attention = [layer for _, layer in sorted(model.attention_instances.items())]
    if not all(isinstance(layer, Attention) and layer.attn_type == AttentionType.DECODER for layer in attention):
        return []
    return [(blocks, attention) for blocks in lists if len(blocks) == len(attention)]


def _attention_per_block(blocks: nn.ModuleList) -> list[Attention]:
    """The one causal attention of every block, or an empty list where any block has none or several."""
    found = []
    for block in blocks:
        inside = [m for m in block.modules() if isinstance(m, Attention)]
        if len(inside) != 1 or inside[0].attn_type != AttentionType.DECODER:
            return []
        found.append(inside[0])
    return found


def attention_shape(layer: Attention) -> AttentionShape:
    """Read what recomputing this layer's attention takes. Raises ``UnsupportedModelError`` where it would differ."""
    impl = layer.impl
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError("attention readouts do not know ALiBi biases")
    if layer.has_sink:
        raise UnsupportedModelError("attention readouts do not know attention sinks")
    return AttentionShape(
        query_heads=layer.num_heads,
        key_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        scale=float(impl.scale),
        softcap=float(getattr(impl, "logits_soft_cap", None) or 0.0),
        window=layer.sliding_window,
    )


@dataclass
class BlockTaps:
    """What happens after one block: steering first, so that a capture shows the steered stream.

    ``embedding``: what is copied on the way into the first block, whose argument ``stream_index`` is the stream.
    """

    steer: SteerTap | None
    hidden: GatherTap | None
    returns_residual: bool
    embedding: GatherTap | None = None
    stream_index: int = 0


@dataclass
class AttentionTaps:
    """What is copied on the way into one layer's attention: queries and keys after rotary embedding and norms."""

    query: GatherTap
    key: GatherTap


def insert(decoder: Decoder, buffers: TapBuffers) -> None:
    """Put the ops into the blocks and attention layers that ``buffers`` has taps for."""
    for number in sorted({max(number, 1) for number in (*buffers.hidden, *buffers.steer)}):
        block = decoder.blocks[number]
        taps = BlockTaps(buffers.steer.get(number), buffers.hidden.get(number), decoder.returns_residual)
        if number == 1 and EMBEDDING in buffers.hidden:
            taps.embedding, taps.stream_index = buffers.hidden[EMBEDDING], _stream_index(block)
        _put(block, taps, _tapped_block)
    for number in buffers.query:
        _put(decoder.attention[number], AttentionTaps(buffers.query[number], buffers.key[number]), _tapped_attention)


def _stream_index(block: nn.Module) -> int:
    """Which argument of a block's ``forward`` is the residual stream. Raises ``UnsupportedModelError``."""
    names = list(inspect.signature(block.forward).parameters)
    if STREAM_ARGUMENT not in names:
        raise UnsupportedModelError(f"{type(block).__name__} has no argument {STREAM_ARGUMENT}: layer 0 has no tap")
    return names.index(STREAM_ARGUMENT)


def _put(module: Any, taps: BlockTaps | AttentionTaps, subclass_of: Callable[[Any], type[nn.Module]]) -> None:
    """Give ``module`` its taps and make it of the subclass that uses them.

    A subclass set on the instance leaves the module tree, parameter names and isinstance checks as they are, and Dynamo
    inlines its method, while it does not see a ``forward`` patched onto an instance.
    """
    module.mia_taps = taps
    module.__class__ = subclass_of(type(module))


@functools.cache
def _tapped_block(base: Any) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        taps = self.mia_taps
        if taps.embedding is not None:
            stream = args[taps.stream_index] if len(args) > taps.stream_index else kwargs[STREAM_ARGUMENT]
            tap = taps.embedding
            torch.ops.mia.gather_rows(stream, None, tap.rows, tap.count, tap.out)
        output = base.forward(self, *args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        residual = output[1] if isinstance(output, tuple) and taps.returns_residual else None
        if taps.steer is not None:
            tap = taps.steer
            torch.ops.mia.steer_rows(
                hidden,
                residual,
                tap.rows,
                tap.slots,
                tap.modes,
                tap.coefficients,
                tap.targets,
                tap.keep_norm,
                tap.bounds,
                tap.bank,
                tap.dose_limit,
                tap.doses,
            )
        if taps.hidden is not None:
            tap = taps.hidden
            torch.ops.mia.gather_rows(hidden, residual, tap.rows, tap.count, tap.out)
        return output

    return type(base.__name__, (base,), {"forward": forward})


@functools.cache
def _tapped_attention(base: Any) -> type[nn.Module]:
    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        for tensor, tap in ((query, self.mia_taps.query), (key, self.mia_taps.key)):
            torch.ops.mia.gather_rows(tensor, None, tap.rows, tap.count, tap.out)
        return base.forward(self, query, key, value, *args, **kw)

    return type(base.__name__, (base,), {"forward": forward})
