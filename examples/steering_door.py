"""What the steering examples need beside ``ask``: loading a vector while the engine runs, and how likely the unsteered
model finds an answer. In this process, or of a server whose steering folder is on this machine."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
from arguments import refuse, whole
from door import model_folder, parser, said_in_one_line, started

from detectors.calibration.readers import open_engine
from guard.mia import MiaClient, MiaLLM
from guard.mia.engine_config import EngineConfig
from guard.mia.results import FloatArray
from guard.steering.coherence import continuation_logprobs
from guard.steering.states import Conversation, Reading
from guard.steering.vector_files import write_vector
from guard.uses.asking import MOST_AT_ONCE, Ask, Told, offline, served
from guard.writable import NotWritableError, check_writable

SERVERS_FOLDER = Path("vectors")
KEY = "local"
"""Routes that change an engine's vectors want a key."""


@dataclass(frozen=True)
class Steerable:
    """``load_from_folder``: returns the SHA-256 of what the engine has now. ``logprobs``: of each token of each answer,
    to the unsteered model."""

    ask: Ask
    folder: Path
    load_from_folder: Callable[[str], str]
    logprobs: Callable[[Sequence[Told]], list[list[float]]]

    def load(self, name: str, vector: FloatArray) -> None:
        """A vector, ``[hidden_size]``, that requests may use from now on. Raises ``NotWritableError``."""
        try:
            write_vector(self.folder, name, vector, {})
        except OSError as error:
            raise NotWritableError(f"{self.folder}: cannot be written to: {error.strerror}") from None
        # Another folder may have a vector of this name, too, and an engine that steers by it looks as if all were well.
        if self.load_from_folder(name) != hashlib.sha256(np.asarray(vector, np.float32).tobytes()).hexdigest():
            refuse(
                f"the engine has another vector {name!r} than the one just written: --vectors, {self.folder}, must be "
                "the server's steering_folder"
            )

    def states(self, conversations: Sequence[Conversation], reading: Reading) -> FloatArray:
        """``[conversations, layers, hidden_size]``."""
        told = self.ask([([dict(one) for one in conversation], reading.spec) for conversation in conversations])
        return np.stack([reading.states(one.prompt) for one in told])


def steering_taps(layer: int, folder: Path, **more: Any) -> EngineConfig:
    """Taps to learn a vector at one layer and to add it there."""
    return EngineConfig(
        hidden_layers=(layer,), steering_layers=(layer,), steering_folder=folder, max_steering_vectors=1, **more
    )


def steering_parser(description: str | None, layer: int, **taps: Any) -> argparse.ArgumentParser:
    made = parser(description, steering_taps(layer, SERVERS_FOLDER, **taps), f"--api-key {KEY}")
    made.add_argument("--layer", type=whole(0), default=layer)
    made.add_argument(
        "--vectors", type=Path, default=SERVERS_FOLDER, help="with --base-url: the server's steering_folder"
    )
    return made


@contextmanager
def steering_door(options: argparse.Namespace, taps: EngineConfig, **vllm_args: Any) -> Iterator[Steerable]:
    """``taps``: of ``steering_taps``. The folder that an engine of our own loads from is one for the time of the
    block."""
    with said_in_one_line(options, taps):
        if options.base_url:
            check_writable(options.vectors)
            yield _of_server(MiaClient(options.base_url, api_key=options.api_key), options.model, options.vectors)
            return
        with tempfile.TemporaryDirectory() as folder:
            own = taps.model_copy(update={"steering_folder": Path(folder)})
            with started(open_engine, model_folder(options.model), own, **vllm_args) as llm:
                yield _of_engine(llm, Path(folder))


def _of_engine(llm: MiaLLM, folder: Path) -> Steerable:
    def logprobs(answers: Sequence[Told]) -> list[list[float]]:
        written = [(one.prompt_token_ids, one.token_ids) for one in answers]
        return continuation_logprobs(llm, written, [None] * len(written))

    def load(name: str) -> str:
        llm.load_vector(name)
        return llm.vectors()[name]

    return Steerable(offline(llm), folder, load, logprobs)


def _of_server(client: MiaClient, model: str, folder: Path) -> Steerable:
    def load(name: str) -> str:
        try:
            loaded: Any = client.client.put(f"/mia/vectors/{name}", cast_to=object)
            return str(loaded["sha256"])
        except openai.NotFoundError:
            refuse(
                "the server has no route /v1/mia/vectors: start vLLM with VLLM_PLUGINS=mia, and ask it and not the "
                "guard's proxy; --help has the whole command"
            )
        except openai.BadRequestError as error:
            reason = error.body.get("message") if isinstance(error.body, dict) else error.message
            refuse(f"{reason}: --vectors, {folder}, must be the server's steering_folder")

    def logprobs_of(one: Told) -> list[float]:
        ids = [*one.prompt_token_ids, *one.token_ids]
        answer: Any = client.client.completions.create(
            model=model, prompt=ids, max_tokens=1, temperature=0.0, extra_body={"prompt_logprobs": 0}
        )
        found = answer.choices[0].prompt_logprobs
        return [found[i][str(ids[i])]["logprob"] for i in range(len(one.prompt_token_ids), len(ids))]

    def logprobs(answers: Sequence[Told]) -> list[list[float]]:
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(logprobs_of, answers))

    return Steerable(served(client, model), folder, load, logprobs)
