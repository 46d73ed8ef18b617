"""Chooses the reranker's heads for SmolLM2 and measures the ranking against BM25's: ``python -m bench.uses.rerank``.

Owns the comparison: the chosen heads, all heads together, and the chosen heads without "N/A", each on the same readings
of the same prompts. The result has every question's rank. With ``--write`` the heads go into ``model_configs``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.about import card, commit, installed
from bench.uses.faq import CANDIDATES, Case, faq, source
from bench.uses.ranking import difference, quality
from detectors.calibration.wheels import pull
from detectors.model_config import ModelInfo
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, FloatArray
from guard.mia.spec import Head
from guard.models import DEFAULT_MODEL, SOURCES
from guard.models import pull as pull_model
from guard.uses.asking import Ask, offline
from guard.uses.parts import UnreadableError, ranges_of
from guard.uses.rerank import (
    CAPTURE,
    NO_QUERY,
    Measured,
    Params,
    RerankerConfig,
    document_scores,
    prompt,
    spec_for,
)
from guard.uses.reranker_heads import TOP_HEADS, best_heads, contrastive_scores

TEMPERATURE = 0.1
"""The paper's for Llama, of whose architecture SmolLM2 is."""

BATCH = 4


def main() -> None:
    options = _options()
    pull("zaragoza-construction-faq")
    data = faq(options.calibration, options.held_out)
    folder = pull_model(DEFAULT_MODEL)
    shape = json.loads((folder / "config.json").read_text())
    heads: tuple[Head, ...] = tuple(
        (layer + 1, head) for layer in range(shape["num_hidden_layers"]) for head in range(shape["num_attention_heads"])
    )
    taps = EngineConfig(attention_heads=heads, max_query_rows_per_step="tokens", max_host_bytes=2**31)
    began_s = time.perf_counter()
    with MiaLLM(
        folder, taps, dtype="float32", max_model_len=4096, max_num_seqs=BATCH, kv_cache_memory_bytes=2**30
    ) as llm:
        ask = offline(llm)
        calibration, held_out = (_read(ask, heads, part, data.answers) for part in (data.calibration, data.held_out))
    mass = [np.stack([tokens.sum(axis=1) for tokens in asked], axis=1) for asked, _ in calibration]
    scores = contrastive_scores(mass, [case.shown.index(case.right) for case in data.calibration], TEMPERATURE)
    chosen = best_heads(scores, heads, TOP_HEADS)
    rows = [heads.index(head) for head in chosen]
    orders = {
        "bm25": [case.candidates for case in data.held_out],
        "core": _orders(data.held_out, held_out, rows),
        "core without N/A": _orders(data.held_out, held_out, rows, blank=False),
        "all heads": _orders(data.held_out, held_out, list(range(len(heads)))),
        "prompt's order": [case.shown for case in data.held_out],
    }
    ranks = {
        name: [case.rank_of(order) for case, order in zip(data.held_out, one, strict=True)]
        for name, one in orders.items()
    }
    result = {
        "about": {
            "command": ["python", "-m", "bench.uses.rerank", *sys.argv[1:]],
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit(),
            "card": card(),
            "versions": dict(installed()),
            "data": source(),
            "model": SOURCES[DEFAULT_MODEL].name,
            "seconds": round(time.perf_counter() - began_s),
        },
        "questions": {"calibration": len(data.calibration), "held_out": len(data.held_out)},
        "candidates": CANDIDATES,
        "recall_at_10_of_candidates": float(np.mean([case.right in case.candidates for case in data.held_out])),
        "heads": [
            {"layer": layer, "head": head, "score": float(scores[heads.index((layer, head))])} for layer, head in chosen
        ],
        "quality": {name: quality(one) for name, one in ranks.items()},
        "ndcg_core_minus_bm25": difference(ranks["core"], ranks["bm25"]),
        "ranks": ranks,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        json.dumps(
            {key: result[key] for key in ("quality", "recall_at_10_of_candidates", "ndcg_core_minus_bm25")}, indent=1
        )
    )
    if options.write:
        _write(chosen, result, options.out, options.write)


def _read(
    ask: Ask, heads: Sequence[Head], cases: Sequence[Case], answers: Sequence[str]
) -> list[tuple[list[FloatArray], list[FloatArray]]]:
    """For each case, with its question and with "N/A": of each document ``[heads, tokens]`` float32."""
    spec = spec_for(heads, CANDIDATES)
    found = []
    for number, case in enumerate(cases):
        documents = [answers[one] for one in case.shown]
        both = ask([(prompt(query, documents), spec) for query in (case.question, NO_QUERY)])
        pair = []
        for readouts in (told.prompt for told in both):
            item = readouts.items[CAPTURE]
            if not isinstance(item, AttentionReadout) or item.weights is None:
                raise UnreadableError(f"question {number}: {item.status} {item.reason}")
            pair.append([item.weights[:, start:end] for start, end in ranges_of(readouts, CANDIDATES)])
        found.append((pair[0], pair[1]))
        print(f"{number + 1} of {len(cases)}", file=sys.stderr)
    return found


def _orders(
    cases: Sequence[Case],
    readings: Sequence[tuple[list[FloatArray], list[FloatArray]]],
    rows: list[int],
    *,
    blank: bool = True,
) -> list[tuple[int, ...]]:
    orders = []
    for case, (asked, without) in zip(cases, readings, strict=True):
        summed, nothing = ([tokens[rows].astype(np.float64).sum(axis=0) for tokens in one] for one in (asked, without))
        scores = document_scores(summed, nothing if blank else [np.zeros_like(one) for one in summed])
        orders.append(tuple(case.shown[i] for i in np.argsort(-scores, kind="stable")))
    return orders


def _write(chosen: Sequence[Head], result: dict, out: Path, folder: Path) -> None:  # type: ignore[type-arg]
    source_, count = SOURCES[DEFAULT_MODEL], result["questions"]
    config = RerankerConfig(
        model_info=ModelInfo(provider="attn-hf", name=source_.name, model_id=f"HuggingFaceTB/{source_.name}"),
        params=Params(important_heads=tuple((layer - 1, head) for layer, head in chosen)),
        measured=Measured(
            date=result["about"]["date"],
            command=" ".join(result["about"]["command"]),
            data=f"{source()}: {count['calibration']} questions to choose on, {count['held_out']} of other categories "
            "to measure on",
            method=f"contrastive score of arXiv 2510.02219, temperature {TEMPERATURE:g}, the {TOP_HEADS} best heads",
            result=out.name,
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{source_.name}.json").write_text(config.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=int, default=24)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", type=Path, help="folder for the config with the heads")
    return parser.parse_args()


if __name__ == "__main__":
    main()
