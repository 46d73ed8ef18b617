"""Chooses SmolLM2's head of schema linking and measures precision and recall: ``python -m bench.uses.schema_linking``.

Owns the comparison with choosing columns by words that they share with the question. The head is chosen on one part of
``examples/clinic.yaml``, and everything else is measured on the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.about import card, commit, installed
from bench.children import ROOT
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.spec import Head
from guard.models import DEFAULT_MODEL, SOURCES
from guard.models import pull as pull_model
from guard.uses.asking import offline
from guard.uses.linking_head import LabelledQuestion, average_precision, head_qualities, read_scores
from guard.uses.schema_linking import TEMPERATURE, TOP_P, Column, Floats, choose

DATA = ROOT / "examples" / "clinic.yaml"
SHOWN_HEADS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    raw = yaml.safe_load(DATA.read_text())
    columns = [Column(name, table) for table, names in raw["tables"].items() for name in names]
    place = {column.text: i for i, column in enumerate(columns)}
    choosing, measuring = (
        [LabelledQuestion(one["question"], frozenset(place[text] for text in one["needed"])) for one in raw[part]]
        for part in ("choose", "measure")
    )
    folder = pull_model(DEFAULT_MODEL)
    shape = json.loads((folder / "config.json").read_text())
    heads: tuple[Head, ...] = tuple(
        (layer + 1, head) for layer in range(shape["num_hidden_layers"]) for head in range(shape["num_attention_heads"])
    )
    with MiaLLM(
        folder,
        EngineConfig(attention_heads=heads, max_host_bytes=2**31),
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**29,
    ) as llm:
        ask = offline(llm)
        chosen_on, measured_on = (read_scores(ask, heads, part, columns) for part in (choosing, measuring))
    qualities = head_qualities(chosen_on, heads, choosing)
    best = heads.index(qualities[0].head)
    result = {
        "about": {
            "command": ["python", "-m", "bench.uses.schema_linking", *sys.argv[1:]],
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "commit": commit(),
            "card": card(),
            "versions": dict(installed()),
            "data": str(DATA.relative_to(ROOT)),
            "model": SOURCES[DEFAULT_MODEL].name,
        },
        "questions": {"choose": len(choosing), "measure": len(measuring)},
        "columns": len(columns),
        "heads_by_average_precision_on_choose": [
            {"layer": one.head[0], "head": one.head[1], "average_precision": one.average_precision}
            for one in qualities[:SHOWN_HEADS]
        ],
        "temperature": TEMPERATURE,
        "quality": {
            **{f"head, top_p {p:g}": quality(measured_on[:, best], measuring, p) for p in (0.2, 0.4, 0.6, TOP_P)},
            "mean of all heads, top_p 0.8": quality(measured_on.mean(axis=1), measuring, TOP_P),
            "shared words": quality(np.stack([shared(one.question, columns) for one in measuring]), measuring, TOP_P),
        },
        "selected": {
            one.question: _named(choose(scores).selected, columns)
            for one, scores in zip(measuring, measured_on[:, best], strict=True)
        },
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("heads_by_average_precision_on_choose", "quality")}, indent=1))


def quality(scores: Floats, questions: Sequence[LabelledQuestion], top_p: float) -> dict[str, Any]:
    """Means over questions. scores: ``[questions, columns]``."""
    chosen = [set(choose(one, TEMPERATURE, top_p).selected) for one in scores]
    right = [len(one & question.needed) for one, question in zip(chosen, questions, strict=True)]
    precision = float(np.mean([n / len(one) for n, one in zip(right, chosen, strict=True)]))
    recall = float(np.mean([n / len(one.needed) for n, one in zip(right, questions, strict=True)]))
    return {
        "precision": precision,
        "recall": recall,
        "selected": float(np.mean([len(one) for one in chosen])),
        "average_precision": float(
            np.mean([average_precision(one, q.needed) for one, q in zip(scores, questions, strict=True)])
        ),
    }


def shared(question: str, columns: Sequence[Column]) -> Floats:
    """``[columns]``: how many words of a column's name, counted twice, and of its table's stand in the question."""
    words = {_stem(word) for word in re.findall(r"[a-z]+", question.lower())}

    def count(text: str) -> int:
        return len(words & {_stem(word) for word in text.split("_")})

    return np.array([2.0 * count(column.name) + count(column.table) for column in columns])


def _stem(word: str) -> str:
    return word.removesuffix("s")


def _named(indices: Sequence[int], columns: Sequence[Column]) -> list[str]:
    return [columns[i].text for i in indices]


if __name__ == "__main__":
    main()
