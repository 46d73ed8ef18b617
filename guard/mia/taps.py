"""Finds the decoder layers and their attention in a loaded model, and inserts the ops there.

Owns what a "layer" is and where its output is whole. Works on any vLLM model whose decoder is one ``ModuleList`` of
blocks with one attention each, and refuses the rest with the reason. Never touches requests or batches.

Relies on (vLLM 0.29): Attention.{impl, attn_type, num_heads, num_kv_heads, head_size, sliding_window, has_sink,
kv_sharing_target_layer_name}, MLAAttention, MambaBase, TransformersBase.attention_instances, and what blocks are called
with: ``hidden_states`` and ``residual``.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.transformers.base import Base as TransformersBase
from vllm.v1.attention.backend import AttentionType

from guard.mia import ops as _ops  # noqa: F401  (registers torch.ops.mia)
from guard.mia.buffers import AttentionShape, GatherTap, QueryTap, TapBuffers

EMBEDDING = 0
"""Layer number of the embedding: the stream on its way into the first block."""

STREAM_ARGUMENT = "hidden_states"
"""What vLLM's and transformers' decoder blocks call the stream."""

RESIDUAL_ARGUMENT = "residual"
"""What vLLM's decoder blocks call the part of the stream that the block before has left to be added."""

POSITION_ARGUMENTS = {"positions", "position_ids"}
"""What they call the tokens' positions."""

TAPS_ATTRIBUTE = "mia_taps"
"""Name under which a tapped module keeps its taps."""


class UnsupportedModelError(RuntimeError):
    """The model cannot be tapped exactly; the message says why."""


@dataclass(frozen=True)
class Decoder:
    """Blocks and their attention by layer number, counted from 1 as in transformers' ``hidden_states``."""

    blocks: dict[int, nn.Module]
    attention: dict[int, Attention]


def find_decoder(model: nn.Module) -> Decoder:
    """Locate the decoder blocks. Raises ``UnsupportedModelError``."""
    name = type(model).__name__
    if reason := _unsupported(model):
        raise UnsupportedModelError(f"{name}: {reason}")
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    candidates = [(blocks, attention) for blocks in lists if (attention := _attention_per_block(blocks))]
    candidates = _without_parts_of_others(candidates + _transformers_backend(model, lists))
    if len(candidates) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(candidates)} lists of decoder blocks with one causal attention each; taps need one"
        )
    ((blocks, attention),) = candidates
    return Decoder(dict(enumerate(blocks, start=1)), dict(enumerate(attention, start=1)))


def _without_parts_of_others(candidates: list[tuple[nn.ModuleList, list[Attention]]]) -> list[Any]:
    """Some models list their blocks a second time in part: those that share keys, for one."""
    kept: list[tuple[nn.ModuleList, list[Attention]]] = []
    for candidate in sorted(candidates, key=lambda candidate: -len(candidate[0])):
        if not any(set(candidate[0]) <= set(blocks) for blocks, _ in kept):
            kept.append(candidate)
    return kept


def _unsupported(model: nn.Module) -> str:
    """Why a model with such layers cannot be tapped, or nothing."""
    for module in model.modules():
        if isinstance(module, MLAAttention):
            return "multi-head latent attention (MLA) keeps no keys of its own for each head"
        if isinstance(module, MambaBase):
            return f"{type(module).__name__} is linear attention or a state-space layer, which has no attention to read"
        if isinstance(module, Attention) and module.attn_type == AttentionType.ENCODER_DECODER:
            return "an encoder-decoder's cross attention reads another text than its prompt"
        if type(module).__name__.endswith("AltUp"):
            return "its blocks carry several streams (AltUp)"
        if getattr(module, "fast_prefill_enabled", False):
            return "with kv_sharing_fast_prefill the last blocks do not see the prompt's tokens"
    return ""


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
    if type(layer) is not Attention and not hasattr(layer, TAPS_ATTRIBUTE):
        raise UnsupportedModelError(f"attention readouts do not know {type(layer).__name__}")
    if getattr(impl, "alibi_slopes", None) is not None:
        raise UnsupportedModelError("attention readouts do not know ALiBi biases")
    if layer.has_sink:
        raise UnsupportedModelError("attention readouts do not know attention sinks")
    if layer.kv_sharing_target_layer_name is not None:
        raise UnsupportedModelError(f"attention readouts: {layer.layer_name} uses the keys of another layer")
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

    ``steer``: number of the tap. ``defers``: see ``_defers``. ``embedding``: what is copied on the way into the first
    block, whose argument ``stream_index`` is the stream.
    """

    buffers: TapBuffers
    steer: int | None
    hidden: GatherTap | None
    defers: bool | None
    embedding: GatherTap | None = None
    stream_index: int = 0


@dataclass
class AttentionTaps:
    """What is copied on the way into one layer's attention: queries after rotary embedding and norms, and keys where
    they are not read from vLLM's cache."""

    control: torch.Tensor
    query: QueryTap
    key: GatherTap | None


def insert(decoder: Decoder, buffers: TapBuffers) -> None:
    """Put the ops into the blocks and attention layers that ``buffers`` has taps for."""
    for number in sorted({max(number, 1) for number in (*buffers.hidden, *buffers.steer)}):
        block = decoder.blocks[number]
        taps = BlockTaps(buffers, buffers.steer.get(number), buffers.hidden.get(number), _defers(block))
        if number == 1 and EMBEDDING in buffers.hidden:
            taps.embedding, taps.stream_index = buffers.hidden[EMBEDDING], _stream_index(block)
        _put(block, taps, _tapped_block)
    for number, query in buffers.query.items():
        taps_of_attention = AttentionTaps(buffers.control.tensor, query, buffers.key.get(number))
        _put(decoder.attention[number], taps_of_attention, _tapped_attention)


def _stream_index(block: nn.Module) -> int:
    """Which argument of a block's ``forward`` is the residual stream. Raises ``UnsupportedModelError``."""
    names = list(inspect.signature(block.forward).parameters)
    if STREAM_ARGUMENT not in names:
        raise UnsupportedModelError(f"{type(block).__name__} has no argument {STREAM_ARGUMENT}: layer 0 has no tap")
    return names.index(STREAM_ARGUMENT)


def _defers(block: nn.Module) -> bool | None:
    """Whether the second tensor that a block returns is still to be added to the first, by the next block.

    A block that reads the ``residual`` it is given does so. One that overwrites it, or takes nothing beside positions
    and the stream, has added everything itself, whatever else it returns. Of any other nobody knows: None.
    """
    forward = inspect.unwrap(type(block).forward)
    names = set(inspect.signature(forward).parameters) - {"self"}
    if RESIDUAL_ARGUMENT in names:
        return _first_use(forward, RESIDUAL_ARGUMENT) == "LOAD"
    return None if names - POSITION_ARGUMENTS - {STREAM_ARGUMENT} else False


def _first_use(function: Callable[..., Any], variable: str) -> str | None:
    """``LOAD`` or ``STORE``: what a function does first with a local variable, in the order in which it evaluates."""
    for instruction in dis.get_instructions(function):
        # One instruction may handle two variables: STORE_FAST_LOAD_FAST with their names as a tuple.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        uses = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
        for name, use in zip(names, uses, strict=False):
            if name == variable:
                return use
    return None


def _stream(output: Any, defers: bool | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors whose sum is the stream after a block that returned ``output``. Raises ``UnsupportedModelError``."""
    hidden, *more = output if isinstance(output, tuple) else (output,)
    second = more[0] if more else None
    known = second is None or (isinstance(second, torch.Tensor) and defers is not None)
    if len(more) > 1 or not known:
        raise UnsupportedModelError("a decoder block returns more than the stream, and taps do not know what")
    if hidden.dim() != 2 and not (hidden.dim() == 3 and hidden.shape[0] == 1):
        raise UnsupportedModelError(f"a decoder block returns {hidden.dim()} dimensions, where one stream has 2")
    return hidden, second if defers else None


def _put(module: Any, taps: BlockTaps | AttentionTaps, subclass_of: Callable[[Any], type[nn.Module]]) -> None:
    """Give ``module`` its taps and make it of the subclass that uses them.

    A subclass set on the instance leaves the module tree, parameter names and isinstance checks as they are, and Dynamo
    inlines its method, while it does not see a ``forward`` patched onto an instance.
    """
    setattr(module, TAPS_ATTRIBUTE, taps)
    module.__class__ = subclass_of(type(module))


@functools.cache
def _tapped_block(base: Any) -> type[nn.Module]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        taps = self.mia_taps
        buffers = taps.buffers
        control = buffers.control.tensor
        if taps.embedding is not None:
            stream = args[taps.stream_index] if len(args) > taps.stream_index else kwargs[STREAM_ARGUMENT]
            torch.ops.mia.gather_rows(stream, None, control, taps.embedding.number, taps.embedding.out)
        output = base.forward(self, *args, **kwargs)
        hidden, residual = _stream(output, taps.defers)
        if taps.steer is not None:
            torch.ops.mia.steer_rows(
                hidden,
                residual,
                control,
                taps.steer,
                buffers.bank,
                buffers.dose_limit,
                buffers.opened_at,
                buffers.doses,
            )
        if taps.hidden is not None:
            torch.ops.mia.gather_rows(hidden, residual, control, taps.hidden.number, taps.hidden.out)
        return output

    return type(base.__name__, (base,), {"forward": forward})


@functools.cache
def _tapped_attention(base: Any) -> type[nn.Module]:
    def forward(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
        taps = self.mia_taps
        torch.ops.mia.gather_rows(query, None, taps.control, taps.query.number, taps.query.out)
        if taps.key is not None:
            torch.ops.mia.gather_rows(key, None, taps.control, taps.key.number, taps.key.out)
        return base.forward(self, query, key, value, *args, **kw)

    return type(base.__name__, (base,), {"forward": forward})
