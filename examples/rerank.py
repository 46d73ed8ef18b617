"""Documents in the order in which a model's attention finds them relevant: ``python examples/rerank.py``.

Served: ``.venv/bin/guard serve --set rerank=true``, then ``--base-url http://127.0.0.1:8001/v1``, its engine's address;
through the proxy any client of Jina's or Cohere's API does, see docs/use-cases/reranking.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from door import door, parser

from detectors.model_config import ModelConfigError
from guard.data import data_folder
from guard.mia.engine_config import EngineConfig
from guard.uses.rerank import load_reranker, rerank

CONFIG = data_folder("model_configs") / "core_reranker" / "SmolLM2-135M-Instruct.json"
QUERY = "How long does it take to get a passport?"
DOCUMENTS = [
    "Passports are issued by the citizens' office. Bring a photo and your old passport.",
    "The office is open from 8 to 12 on weekdays, and until 18 on Thursdays.",
    "A new passport is ready after about two weeks; an express passport after three days.",
    "A dog must be registered within four weeks.",
    "Driving licences are renewed every fifteen years.",
]


def taps(config: Path) -> EngineConfig:
    return EngineConfig(attention_heads=load_reranker(config).heads, max_query_rows_per_step="tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, taps(CONFIG))
    made.add_argument("--config", type=Path, default=CONFIG)
    options = made.parse_args(arguments)
    try:
        heads = load_reranker(options.config).heads
    except ModelConfigError as error:
        made.error(f"argument --config: {error}")
    with door(options, taps(options.config)) as ask:
        for one in rerank(ask, heads, QUERY, DOCUMENTS):
            print(f"{one.score:+.4f}  {DOCUMENTS[one.index]}")


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
