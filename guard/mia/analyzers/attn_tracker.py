"""The ``attn_tracker`` analyzer: how much of the last prompt token's attention goes to the instruction.

The attention is recomputed from queries and keys with the model's own scale. A score is no verdict: there is no
threshold here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from guard.mia.analyzers.probes import MissingReadoutError, Probes, load_probes, present

EPSILON = 1e-8

Range = Sequence[int]


class AttentionTrackerAnalyzer:
    """``{"score": [one number for each request]}``: the mean over heads of attention on the instruction.

    ``analyzer_spec``: ``input_range`` is ``((i0, i1), (d0, d1))``, the tokens of instruction and data counted as slices
    of the prompt are, or a list with one such pair for each request; ``attn_func`` is ``sum``, ``max``,
    ``sum_normalize`` or ``max_normalize``, where the normalized ones divide by the attention on both together.
    ``layer_to_heads`` names the heads, layers from 0; without it all that were read count.
    """

    ACCEPTS = "either"

    def __init__(
        self, hook_dir: str | Path | None = None, layer_to_heads: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.hook_dir = hook_dir
        self.layer_to_heads = {int(layer): tuple(heads) for layer, heads in (layer_to_heads or {}).items()}

    def analyze(
        self, analyzer_spec: Mapping[str, Any], run_id: str | None = None, probes: Probes | None = None
    ) -> dict[str, list[float]]:
        """Raises ``ValueError`` for a wrong spec, ``MissingReadoutError`` when a layer, head or value is missing."""
        attn_func = str(analyzer_spec.get("attn_func", "sum_normalize"))
        if not ("sum" in attn_func or "max" in attn_func):
            raise ValueError(f"attn_func has sum or max in its name, unlike {attn_func!r}")
        cache = (load_probes(self.hook_dir, run_id) if probes is None else probes).get("qk_cache", {})
        if not cache:
            raise MissingReadoutError("no queries and keys were read: ask for output_qk")
        if missing := sorted(self.layer_to_heads.keys() - cache.keys()):
            raise MissingReadoutError(f"layers {missing} of layer_to_heads were not read")
        requests = len(next(iter(cache.values()))["reasons"])
        ranges = _ranges(analyzer_spec.get("input_range"), requests)
        return {"score": [self._score(cache, i, ranges[i], attn_func) for i in range(requests)]}

    def _score(self, cache: dict[int, dict[str, Any]], request: int, ranges: Sequence[Range], attn_func: str) -> float:
        scores = []
        for layer in self.layer_to_heads or cache:
            entry = cache[layer]
            heads = self.layer_to_heads.get(layer, tuple(entry["heads"]))
            if missing := sorted(set(heads) - set(entry["heads"])):
                raise MissingReadoutError(f"heads {missing} of layer {layer} were not read")
            attention = last_token_attention(entry, request)
            rows = attention[[entry["heads"].index(head) for head in heads]]
            scores.append(_head_scores(rows, ranges, attn_func))
        return float(torch.cat(scores).mean())


def _ranges(value: Any, requests: int) -> list[Sequence[Range]]:
    """The pair of ranges of each request."""
    try:
        one_for_all = isinstance(value[0][0], int)
        pairs = [value] * requests if one_for_all else list(value)
        well_formed = all(len(pair) == 2 and all(len(ends) == 2 for ends in pair) for pair in pairs)
    except (TypeError, KeyError, IndexError):
        well_formed = False
    if not well_formed or len(pairs) != requests:
        raise ValueError(f"input_range is ((i0, i1), (d0, d1)), or a list of {requests} of these, not {value!r}")
    return pairs


def _head_scores(attention: torch.Tensor, ranges: Sequence[Range], attn_func: str) -> torch.Tensor:
    """attention: ``[heads, tokens]``. Returns ``[heads]``."""
    instruction, data = (attention[:, start:end] for start, end in ranges)
    if not instruction.shape[1]:
        raise ValueError(f"input_range: there are no tokens in {tuple(ranges[0])}")
    score = instruction.sum(dim=1) if "sum" in attn_func else instruction.amax(dim=1)
    if "normalize" in attn_func:
        score = score / (instruction.sum(dim=1) + data.sum(dim=1) + EPSILON)
    return score


def last_token_attention(entry: Mapping[str, Any], request: int) -> torch.Tensor:
    """Attention probabilities of the last prompt token over the prompt. Returns ``[heads, prompt tokens]`` float32.

    entry: of a ``qk_cache``.
    """
    if "score" in entry:
        return present(entry, "score", request)[:, -1]  # type: ignore[no-any-return]
    queries, keys = present(entry, "q", request), present(entry, "k_all", request)
    tokens = entry["prompt_tokens"][request]
    if tokens - 1 not in entry["positions"][request]:
        raise MissingReadoutError(f"layer {entry['layer_num']}, request {request}: the last prompt token was not read")
    row = queries if queries.dim() == 1 else queries[entry["positions"][request].index(tokens - 1)]
    heads, kv_heads = entry["heads"], entry["kv_heads"]
    query = row.view(len(heads), -1)
    key = keys[:tokens].view(tokens, len(kv_heads), -1)
    key_of = [list(kv_heads).index(head // entry["group"]) for head in heads]
    logits = torch.einsum("hd,thd->ht", query, key[:, key_of]) * entry["scale"]
    if entry["softcap"]:
        logits = entry["softcap"] * torch.tanh(logits / entry["softcap"])
    if entry["window"] is not None:
        logits[:, : max(0, tokens - entry["window"])] = -torch.inf
    return torch.softmax(logits, dim=-1)
