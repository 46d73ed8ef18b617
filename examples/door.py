"""What all examples share: an engine of their own with the taps that they need, or a server that has them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from arguments import OneLineParser, Terminated, address, ending_when_told, refuse
from pydantic import ValidationError

from detectors.calibration.features import model_shape
from guard.mia import MiaClient, MiaLLM
from guard.mia.compat import CompatError
from guard.mia.engine_config import EngineConfig
from guard.mistakes import first_mistake
from guard.models import DEFAULT_MODEL, ModelError, pull
from guard.steering.learning import LearningError
from guard.steering.states import StatesError
from guard.uses.asking import Ask, offline, served
from guard.uses.parts import UnreadableError
from guard.writable import NotWritableError

STOPPED, TERMINATED = 130, 143
"""The exit status of whoever ends at Ctrl-C, and at SIGTERM."""
SERVER_URL = "http://127.0.0.1:8001/v1"
ON_A_CPU = "--dtype float32 --enforce-eager --gpu-memory-utilization 0.3"


def parser(description: str | None, taps: EngineConfig, *server_arguments: str) -> argparse.ArgumentParser:
    """``taps``: those that a server needs for what the example does unless told otherwise; ``server_arguments``: others
    of its own, which the example takes, too."""
    to_ask_it = " ".join(["--base-url", SERVER_URL, *server_arguments])
    made = OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"A server that it can ask, on a CPU; on a GPU leave out the last line:\n\n"
        f"{server_command(taps, *server_arguments)}\n\nThen add: {to_ask_it}",
    )
    made.add_argument(
        "--model", default=DEFAULT_MODEL, help="short name or folder; with --base-url what the server calls it"
    )
    made.add_argument(
        "--base-url", type=address, help=f"of a vLLM with the taps, as {SERVER_URL}; without: an engine of our own"
    )
    made.add_argument("--api-key", help="that the server wants")
    return made


def server_command(taps: EngineConfig, *more: str) -> str:
    """How to start vLLM with the default model and these taps. The page of each example has it, too."""
    lines = [
        # Without it vLLM loads the taps, and none of the plugin's routes.
        "VLLM_PLUGINS=mia .venv/bin/python -m vllm.entrypoints.openai.api_server",
        f"--model ~/.cache/mia-guard/models/SmolLM2-135M-Instruct --served-model-name {DEFAULT_MODEL}",
        "--port 8001 --max-model-len 4096 --middleware guard.mia.server.MiaMiddleware",
        *more,
        f"--additional-config '{additional_config(taps)}'",
        ON_A_CPU,
    ]
    return " \\\n  ".join(lines)


def additional_config(taps: EngineConfig) -> str:
    return json.dumps({"mia": taps.model_dump(mode="json", exclude_defaults=True)})


@contextmanager
def door(options: argparse.Namespace, taps: EngineConfig, **vllm_args: object) -> Iterator[Ask]:
    """Asks the server of ``--base-url``, or an engine that lives as long as the block."""
    with said_in_one_line(options, taps):
        if options.base_url:
            yield served(MiaClient(options.base_url, api_key=options.api_key), options.model)
            return
        arguments = {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "kv_cache_memory_bytes": 2**29}
        with started(MiaLLM, model_folder(options.model), taps, **{**arguments, **vllm_args}) as llm:
            yield offline(llm)


def started(engine: Callable[..., MiaLLM], folder: Path, taps: EngineConfig, **vllm_args: Any) -> MiaLLM:
    """An engine of our own. ``engine`` makes it of model, taps and vLLM's arguments."""
    check_shape(folder, taps)
    try:
        return engine(folder, taps, **vllm_args)
    except ValidationError as error:
        refuse(f"the engine does not start: {first_mistake(error)[1]}")
    except (OSError, RuntimeError, ValueError) as error:
        # vLLM's own lines above it say more.
        refuse(f"the engine does not start: {error}")


def check_shape(folder: Path, taps: EngineConfig) -> None:
    """Before vLLM starts, which takes half a minute."""
    try:
        shape = model_shape(folder)
    except (OSError, ValueError, LookupError):
        refuse(f"there is no model in {folder}: its config.json cannot be read")
    layers = {*taps.hidden_layers, *taps.steering_layers, *(layer for layer, _ in taps.attention_heads)}
    if max(layers, default=0) > shape.layers:
        refuse(f"there is no layer {max(layers)}: the model in {folder} has {shape.layers}")
    if (head := max((head for _, head in taps.attention_heads), default=0)) >= shape.heads:
        refuse(f"there is no head {head}: the model in {folder} has {shape.heads}, and the first is 0")


@contextmanager
def said_in_one_line(options: argparse.Namespace, taps: EngineConfig) -> Iterator[None]:
    """Ends the example with one line about what a server, a readout or a folder lacks; and in order when terminated."""
    try:
        with ending_when_told():
            yield
    except openai.APIStatusError as error:
        body = error.body if isinstance(error.body, dict) else {}
        message, where = str(body.get("message") or error.message), str(body.get("param") or "")
        if isinstance(error, openai.AuthenticationError):
            wrong = "does not take this key" if options.api_key else "wants a key"
            message = f"the server at {options.base_url} {wrong}: give its own with --api-key"
        elif "set by the guard alone" in message:
            message += f": this is the guard's proxy; give the address of its engine, as {SERVER_URL}"
        elif "mia" in where or "mia" in message:
            message += f": start the server with --additional-config '{additional_config(taps)}'"
        refuse(message)
    except openai.APIConnectionError:
        refuse(f"no server answers at {options.base_url}: --help says how to start one")
    except Terminated:
        refuse("stopped", TERMINATED)
    except KeyboardInterrupt:
        refuse("stopped", STOPPED)
    except (CompatError, LearningError, NotWritableError, StatesError, UnreadableError) as error:
        refuse(str(error))


def model_folder(model: str) -> Path:
    """Pulled first where it is a short name."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return pull(model)
    except ModelError as error:
        refuse(f"--model: {error}")
