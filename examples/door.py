"""What all examples share: an engine of their own with the taps that they need, or a server that has them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from guard.mia import MiaClient, MiaLLM
from guard.mia.engine_config import EngineConfig
from guard.models import DEFAULT_MODEL, pull
from guard.uses.asking import Ask, offline, served


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--model", default=DEFAULT_MODEL, help="short name or folder; with --base-url what the server calls it"
    )
    made.add_argument(
        "--base-url", help="of a vLLM with the taps, as http://127.0.0.1:8001/v1; without: an engine of our own"
    )
    made.add_argument("--api-key", help="that the server wants")
    return made


@contextmanager
def door(options: argparse.Namespace, taps: EngineConfig, **vllm_args: object) -> Iterator[Ask]:
    """Asks the server of ``--base-url``, or an engine that lives as long as the block."""
    if options.base_url:
        yield served(MiaClient(options.base_url, api_key=options.api_key), options.model)
        return
    arguments = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**29}
    with MiaLLM(model_folder(options.model), taps, **{**arguments, **vllm_args}) as llm:
        yield offline(llm)


def model_folder(model: str) -> Path:
    """Pulled first where it is a short name."""
    return Path(model) if Path(model).is_dir() else pull(model)
