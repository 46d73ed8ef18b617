"""The two engines that calibration reads with: one of its own, offline, and one that runs already, over HTTP.

Owns starting the one and asking the other. Both give the same readouts of the same conversation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detectors.calibration.captures import Extra
from detectors.calibration.feature_store import FeatureError, Plan
from detectors.calibration.features import (
    MAX_MODEL_LEN,
    WINDOW_LAYERS,
    WINDOW_TOKENS,
    ModelShape,
    evenly_spaced,
    most_tokens,
)
from guard.mia.client import MiaClient
from guard.mia.engine_config import EngineConfig
from guard.mia.results import Readout, Readouts
from guard.mia.spec import MiaSpec

if TYPE_CHECKING:
    import openai

ROWS_PER_STEP = 8192
"""Rows of the residual stream that one step may copy: a whole step's tokens, as all of the data is read."""
HOST_BYTES = 2 << 30
HTTP_CONNECTIONS = 8

DIED = (
    "the engine died, most often since the machine has too little memory for it (its own words are above); what it had "
    "read is kept, and the same command goes on from there"
)

ANSWER_LIMIT = "max_answer_bytes"
"""The engine's setting, by which a readout's reason is known."""
TOO_LARGE_ALONE = (
    f"it alone is larger than the engine's {ANSWER_LIMIT}: start the engine with more, shorten the row, or leave out "
    "--url"
)

Conversation = Sequence[dict[str, str]]


@dataclass(frozen=True)
class OfflineReader:
    llm: Any

    def read(
        self, conversations: Sequence[Conversation], specs: Sequence[MiaSpec], answer_tokens: int
    ) -> list[Readouts]:
        answers = self.llm.chat(conversations, specs, max_tokens=1 + answer_tokens)
        return [of_all_stages(answer.readouts) for answer in answers]


@contextmanager
def offline_reader(model: Path, plan: Plan, extras: Sequence[Extra] = ()) -> Iterator[OfflineReader]:
    """A reader with an engine of its own, which ends with it. Raises ``FeatureError`` when the engine dies."""
    from vllm.v1.engine.exceptions import EngineDeadError

    parts = [extra.captures for extra in extras]
    layers = {*plan.layers, *plan.window_layers, *(one.layer for part in parts for one in part.hidden.values())}
    heads = {*plan.heads, *(head for part in parts for one in part.attention.values() for head in one.heads)}
    config = EngineConfig(
        hidden_layers=tuple(sorted(layers)),
        attention_heads=tuple(sorted(heads)),
        max_hidden_rows_per_step=ROWS_PER_STEP,
        max_host_bytes=HOST_BYTES,
        max_shared_bytes=HOST_BYTES,
    )
    try:
        with open_engine(model, config) as llm:
            yield OfflineReader(llm)
    except EngineDeadError as error:
        raise FeatureError(DIED) from error


def of_all_stages(readouts: Sequence[Readouts]) -> Readouts:
    """What came with the prompt and what came with the answer, as one. There is no answer's last token in it: it is
    never fed to the model."""
    return replace(readouts[0], items={name: item for one in readouts for name, item in one.items.items()})


def open_engine(model: Path, config: EngineConfig, **vllm_args: Any) -> Any:
    """An offline engine with these taps. Float32 on a CPU, where it is both exact and fastest; else the model's own."""
    import torch

    from guard.mia.llm import MiaLLM

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    dtype = "auto" if torch.cuda.is_available() else "float32"
    return MiaLLM(model, config, **{"dtype": dtype, "max_model_len": most_tokens(model), **vllm_args})


@dataclass(frozen=True)
class HttpReader:
    """Reads with the engine at ``client``, several requests at a time."""

    client: MiaClient
    model: str

    def read(
        self, conversations: Sequence[Conversation], specs: Sequence[MiaSpec], answer_tokens: int
    ) -> list[Readouts]:
        with ThreadPoolExecutor(HTTP_CONNECTIONS) as pool:
            return list(pool.map(partial(self._read_one, answer_tokens), conversations, specs))

    def _read_one(self, answer_tokens: int, conversation: Conversation, spec: MiaSpec) -> Readouts:
        """In as many answers as it takes: an engine fills one up to its limit and says what it left out."""
        read = self._ask(answer_tokens, conversation, spec)
        while left := {name for name, one in read.items.items() if did_not_fit(one)}:
            more = self._ask(answer_tokens, conversation, _only(spec, left))
            read = replace(read, items={**read.items, **more.items})
            if all(did_not_fit(one) for one in more.items.values()):
                alone = {name: replace(one, reason=TOO_LARGE_ALONE) for name, one in more.items.items()}
                return replace(read, items={**read.items, **alone})
        return read

    def _ask(self, answer_tokens: int, conversation: Conversation, spec: MiaSpec) -> Readouts:
        answer = self.client.generate(
            list(conversation),
            self.model,
            max_tokens=1 + answer_tokens,
            temperature=0.0,
            capture=False,
            extra_xargs={"mia": spec.to_wire()},
        )
        event = getattr(answer, "mia", None)
        if event is None or "readouts" not in event:
            raise FeatureError("the engine answered without readouts: is it a vLLM with the plugin mia?")
        return of_all_stages([Readouts.from_wire(one) for one in event["readouts"]])


def did_not_fit(readout: Readout) -> bool:
    """Whether it was left out because the answer was full."""
    return readout.status == "dropped" and ANSWER_LIMIT in readout.reason


def _only(spec: MiaSpec, names: Set[str]) -> MiaSpec:
    """For these captures alone."""
    hidden = {name: one for name, one in spec.hidden.items() if name in names}
    attention = {name: one for name, one in spec.attention.items() if name in names}
    return spec.model_copy(update={"hidden": hidden, "attention": attention})


@dataclass(frozen=True)
class Served:
    """An engine that runs. ``dtype``, ``quantization``: empty where it does not say. shape: None where it does not."""

    name: str
    root: str
    dtype: str
    quantization: str
    version: str
    shape: ModelShape | None
    plan: Plan

    def kept_under(self, model_sha256: str) -> str:
        """For ``FeatureStore``: what such an engine reads is kept apart from what one of our own does, of which weights
        and precision are known."""
        return json.dumps([model_sha256, self.name, self.root, self.dtype, self.quantization, self.version])

    def check_shape(self, shape: ModelShape) -> None:
        """Raise ``FeatureError`` where the engine's model is another than one of ``shape``."""
        if self.shape is not None and self.shape != shape:
            raise FeatureError(
                f"the engine serves {self.name}, of {self.shape}; --model is of {shape}: give the folder of the "
                "model that it serves"
            )


@contextmanager
def http_reader(base_url: str, api_key: str | None, served: Served) -> Iterator[HttpReader]:
    """A reader with the engine at ``base_url``, which ends in ``/v1``. Raises ``FeatureError``."""
    import openai

    try:
        yield HttpReader(MiaClient(base_url, api_key=api_key), served.name)
    except openai.APIError as error:
        raise _told(base_url, error) from error


def _told(base_url: str, error: openai.APIError) -> FeatureError:
    from openai import AuthenticationError

    if isinstance(error, AuthenticationError):
        return FeatureError(
            f"the engine at {base_url} refuses the key (401): give its key with --api-key, or in GUARD_UPSTREAM_API_KEY"
        )
    return FeatureError(f"the engine at {base_url}: {error.message}")


def served_engine(base_url: str, api_key: str | None) -> Served:
    """What the engine at ``base_url`` serves and has taps for. Raises ``FeatureError``."""
    import openai

    client = MiaClient(base_url, api_key=api_key).client
    try:
        told: Any = client.get("/mia/capabilities", cast_to=object)
        models: Any = client.get("/models", cast_to=object)
    except openai.NotFoundError as error:
        raise FeatureError(
            f"the engine at {base_url} does not say what it has taps for (404): the address ends in /v1, and vLLM is "
            "started with VLLM_PLUGINS=mia, --middleware guard.mia.server.MiaMiddleware and taps"
        ) from error
    except openai.APIError as error:
        raise _told(base_url, error) from error
    # An adapter's card names the model that it changes.
    card = next((one for one in models["data"] if not one.get("parent")), None)
    if card is None:
        raise FeatureError(f"the engine at {base_url} serves no model")
    model = told.get("model") or {}
    sizes: list[Any] = [model.get(name) for name in ("layers", "heads", "hidden_size")]
    shape = ModelShape(*sizes) if all(sizes) else None
    return Served(
        card["id"],
        str(card.get("root") or ""),
        model.get("dtype") or "",
        model.get("quantization") or "",
        str(told.get("vllm_version")),
        shape,
        plan_of_taps(told["taps"] or {}),
    )


def plan_of_taps(taps: dict[str, Any]) -> Plan:
    """What an engine with these taps lets one read. Raises ``FeatureError`` when that is nothing."""
    layers = tuple(sorted(layer for layer in taps.get("hidden_layers", ()) if layer > 0))
    if not layers:
        raise FeatureError(
            "the engine has no taps for hidden states: start it with --additional-config "
            '\'{"mia": {"hidden_layers": [...], "attention_heads": [...]}}\', or calibrate without --url'
        )
    heads = tuple((layer, head) for layer, head in taps.get("attention_heads", ()))
    windows = evenly_spaced(layers, min(WINDOW_LAYERS, len(layers))) if _has_room(taps) else ()
    return Plan(layers, heads, windows, WINDOW_TOKENS)


def _has_room(taps: dict[str, Any]) -> bool:
    """Whether the states of every token of a conversation always fit into a step. Raises ``FeatureError``."""
    rows = taps.get("max_hidden_rows_per_step")
    if rows is None or rows == "tokens":  # as many as requests, or as many as a step holds
        return rows is not None
    if not isinstance(rows, int):
        raise FeatureError(
            f"the engine's max_hidden_rows_per_step is {rows!r}, which this version does not know: use one version of "
            "mia-guard on both sides, or calibrate without --url"
        )
    return rows >= MAX_MODEL_LEN
