"""MIA's ``probes``: what a batch of requests read, by layer, each request in its place.

Owns the layout, and what it adds to MIA's: positions, and why a value is missing. A value that is missing is None with
a reason, never left out.

    {"hs_cache": {LAYER: {"hidden_states": [...], "layer_num": LAYER, "positions": [...], "reasons": [...]}},
     "qk_cache": {LAYER: {"q": [...], "k_all": [...], "layer_num": LAYER, "positions": [...], "reasons": [...],
                          "prompt_tokens": [...], "heads": (...), "kv_heads": (...), "group": n, "scale": x,
                          "softcap": x, "window": n}}}

Layers have MIA's numbers: of hidden states from 1, of heads from 0. Lists have an entry for each choice of each prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guard.mia.artifacts import load_artifact
from guard.mia.results import AttentionReadout, FloatArray, HiddenReadout, QKReadout, Readout, Readouts, RowsReadout

Probes = dict[str, dict[int, dict[str, Any]]]

NOT_ASKED = "this request did not ask for it"
ONLY_LAST = ".last_prompt"
"""End of the names of captures of the prompt's last token alone, of which MIA gives vectors and not rows."""


class MissingReadoutError(ValueError):
    """An analyzer needs a value that is not there; the message says which and why."""


def probes_of(readouts: Iterable[Readouts]) -> Probes:
    """All readouts of one or more requests, whatever their stage, in MIA's layout."""
    requests: dict[tuple[int, int], dict[str, Readout]] = {}
    prompt_tokens: dict[tuple[int, int], int] = {}
    for one in readouts:
        place = (one.prompt_index, one.choice_index)
        requests.setdefault(place, {}).update(one.items)
        prompt_tokens[place] = one.prompt_tokens
    places = sorted(requests)
    hidden = {place: _hidden_by_layer(requests[place].values()) for place in places}
    qk = {place: _qk_by_layer(requests[place], prompt_tokens[place]) for place in places}
    probes = {"hs_cache": _table(hidden, places), "qk_cache": _table(qk, places)}
    return {name: cache for name, cache in probes.items() if cache}


def in_batch(batch: Sequence[Sequence[Readouts]]) -> list[Readouts]:
    """Readouts of several requests of one prompt each, as those of one request of several prompts."""
    return [replace(one, prompt_index=i) for i, request in enumerate(batch) for one in request]


def load_probes(hook_dir: str | Path | None, run_id: str | None) -> Probes:
    """What ``save_to_disk`` wrote. Raises ``MissingReadoutError`` when there is nothing of that run."""
    if hook_dir is None or run_id is None:
        raise MissingReadoutError("nothing to analyze: pass probes, or generate first")
    folder = Path(hook_dir) / run_id
    if not folder.is_dir():
        raise MissingReadoutError(f"there is no run {run_id!r} in {hook_dir}: generate with save_to_disk=True first")
    return probes_of(load_artifact(folder))


def present(cache: Mapping[str, Any], field: str, request: int) -> Any:
    """One request's value. Raises ``MissingReadoutError`` with the reason when there is none."""
    value = cache[field][request]
    if value is None:
        raise MissingReadoutError(
            f"layer {cache['layer_num']}, request {request}: no {field}: {cache['reasons'][request]}"
        )
    return value


def _table(by_place: Mapping[Any, dict[int, dict[str, Any]]], places: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """A column for each field: a list with one entry for each request, or the value where all share it."""
    table: dict[int, dict[str, Any]] = {}
    for layer in sorted({layer for entries in by_place.values() for layer in entries}):
        entries = [by_place[place].get(layer, {"reasons": NOT_ASKED}) for place in places]
        per_request = [field for entry in entries for field in entry if field not in SHARED]
        table[layer] = {field: [entry.get(field) for entry in entries] for field in dict.fromkeys(per_request)}
        for entry in entries:
            table[layer].update({field: entry[field] for field in SHARED if field in entry})
        table[layer]["layer_num"] = layer
    return table


SHARED = ("heads", "kv_heads", "group", "scale", "softcap", "window")
"""Fields that are the layer's and not the request's."""


def _hidden_by_layer(items: Iterable[Readout]) -> dict[int, dict[str, Any]]:
    by_layer: dict[int, list[HiddenReadout | RowsReadout]] = {}
    for item in items:
        if isinstance(item, HiddenReadout | RowsReadout):
            by_layer.setdefault(item.layer, []).append(item)
    return {layer: _hidden_entry(parts) for layer, parts in by_layer.items()}


def _hidden_entry(parts: list[HiddenReadout | RowsReadout]) -> dict[str, Any]:
    if (reason := _incomplete(parts)) is not None:
        return {"hidden_states": None, "positions": (), "reasons": reason}
    alone = parts[0]
    if len(parts) == 1 and isinstance(alone, HiddenReadout) and alone.values is not None:
        return {"hidden_states": _tensor(alone.values), "positions": (alone.position,), "reasons": ""}
    positions, values = _in_order([_rows(part) for part in parts])
    return {"hidden_states": _tensor(values), "positions": positions, "reasons": ""}


def _rows(item: HiddenReadout | RowsReadout) -> tuple[tuple[int, ...], FloatArray]:
    if item.values is None:
        return (), np.zeros((0, 0), np.float32)
    if isinstance(item, RowsReadout):
        return item.positions, item.values
    return (() if item.position is None else (item.position,)), item.values[None]


def _in_order(parts: Iterable[tuple[tuple[int, ...], FloatArray]]) -> tuple[tuple[int, ...], FloatArray]:
    """Rows of several captures as one, each position once, in the order of the text."""
    parts = list(parts)
    rows = {position: row for positions, values in parts for position, row in zip(positions, values, strict=True)}
    ordered = tuple(sorted(rows))
    return ordered, np.stack([rows[position] for position in ordered]) if rows else parts[0][1]


def _qk_by_layer(items: Mapping[str, Readout], prompt_tokens: int) -> dict[int, dict[str, Any]]:
    parts = {name: item for name, item in items.items() if isinstance(item, QKReadout)}
    scores = [item for item in items.values() if isinstance(item, AttentionReadout) and item.weights is not None]
    only_last = len(parts) == 1 and next(iter(parts)).endswith(ONLY_LAST)
    read: list[QKReadout | AttentionReadout] = [*parts.values(), *scores]
    by_layer: dict[int, dict[str, Any]] = {}
    for layer in {layer for item in read for layer, _ in item.heads}:
        numbers = next(item.heads for item in read if any(n == layer for n, _ in item.heads))
        heads = tuple(head for n, head in numbers if n == layer)
        entry = _qk_entry(list(parts.values()), layer, only_last) if parts else _score_entry(scores[0], layer)
        by_layer[layer - 1] = {**entry, "heads": heads, "prompt_tokens": prompt_tokens}
    return by_layer


def _qk_entry(parts: list[QKReadout], layer: int, only_last: bool) -> dict[str, Any]:
    if (reason := _incomplete(parts)) is not None:
        return {"q": None, "k_all": None, "positions": (), "reasons": reason}
    read = [part for part in parts if layer in part.queries]
    positions, queries = _in_order([(part.positions, part.queries[layer]) for part in read])
    keys = max((part.keys[layer] for part in read), key=len)
    rows = _tensor(queries).flatten(1)
    return {
        "q": rows[0] if only_last else rows,
        "k_all": _tensor(keys).flatten(1),
        "kv_heads": read[0].kv_heads[layer],
        "group": read[0].group[layer],
        "scale": read[0].scale[layer],
        "softcap": read[0].softcap[layer],
        "window": read[0].window[layer],
        "positions": positions,
        "reasons": "",
    }


def _score_entry(item: AttentionReadout, layer: int) -> dict[str, Any]:
    """``score``: ``[heads, 1, prompt tokens]``, the attention probabilities themselves."""
    if (reason := _incomplete([item])) is not None or item.weights is None:
        return {"score": None, "positions": (), "reasons": reason}
    rows = [i for i, (n, _) in enumerate(item.heads) if n == layer]
    return {"score": _tensor(item.weights[rows])[:, None], "positions": item.positions, "reasons": ""}


def _incomplete(parts: Iterable[Readout]) -> str | None:
    """Why a value is missing, or None when all parts are there."""
    for part in parts:
        if part.status != "complete":
            return f"{part.status}: {part.reason}"
    return None


def _tensor(values: FloatArray) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))
