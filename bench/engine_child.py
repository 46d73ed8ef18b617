"""One engine in a process of its own: reads commands from stdin, answers on stdout, one line of JSON each.

    {"command": "start", ...}      -> {"start_s": ..., "worker": {...}, "pinned": {...}}
    {"command": "run", ...}        -> {"seconds": ..., ...}
    {"command": "profile", ...}    -> {"kernels": {NAME: [how often, microseconds]}}
    {"command": "changed", ...}    -> {"changed": ..., "of": ...}

Owns the clock: from the first request's admission to the last one's end, in this process, as an offline user sees it.
Checks what was asked for outside of it: a run whose readouts are not complete is an error. Ends when stdin does.

``MiaLLM.chat`` takes conversations alone, and ``MiaLLM.generate`` makes MIA's tensors of every answer before it
returns; so requests with prompts of token ids go the way of ``chat`` here, with its check and the front end's
``prepare``, and those of other engines go the same way without the two.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.pinning import pin_main_threads
from bench.shapes import Shape, load_shape
from bench.variants import VARIANTS, VECTORS, EngineName, taps_of, vector_name

FILES_PATIENCE_S = 20.0
UNLIKELY_IDS = 100
"""Ids below are often special."""


def token_ids(shape: Shape, length: int, *seed: int) -> list[int]:
    """A prompt that no other seed has."""
    rng = np.random.default_rng([length, *seed])
    return [int(token) for token in rng.integers(UNLIKELY_IDS, shape.vocabulary, length)]


@dataclass
class Batch:
    """What one run generates. Lengths in tokens, by request."""

    variant: str
    prompt_tokens: list[int]
    output_tokens: list[int]
    seed: int


@dataclass
class Done:
    seconds: float
    answers: list[tuple[int, ...]]
    readouts: int


class Engine:
    """One running engine, ours or another."""

    def __init__(self, name: EngineName, shape: Shape, vllm_args: dict[str, Any], scratch: Path) -> None:
        self.name, self.shape, self.taps = name, shape, taps_of(shape)
        self.files = scratch / "extract" if name == "extract" else None
        self.mia: Any = None
        vllm_args = dict(vllm_args)
        if name == "hotwire":
            _write_hotwire_vectors(scratch)
        if name == "mia":
            from guard.mia.llm import MiaLLM

            self.mia = MiaLLM(vllm_args.pop("model"), self.taps.engine_config(scratch / "mia"), **vllm_args)
            self.llm = self.mia.llm
        else:
            from vllm import LLM

            self.llm = LLM(**vllm_args)
        if name == "hooks":
            self.llm.collective_rpc("bench_install_hooks", args=(list(self.taps.hidden_layers),))
        self._ids = itertools.count()

    def report(self) -> dict[str, Any]:
        (report,) = self.llm.collective_rpc("bench_report")
        return dict(report)

    def run(self, batch: Batch) -> Done:
        """Raises ``RuntimeError`` when something that was asked for did not come."""
        from vllm import SamplingParams
        from vllm.renderers.inputs.preprocess import parse_model_prompt

        prompts = [token_ids(self.shape, length, batch.seed, i) for i, length in enumerate(batch.prompt_tokens)]
        asked = [VARIANTS[batch.variant].ask(self.taps, i, len(prompt)) for i, prompt in enumerate(prompts)]
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, extra_args=extra)
            for n, extra in zip(batch.output_tokens, asked, strict=True)
        ]
        contexts = self._contexts(params)
        copies = self._hook_copies()
        llm, engine = self.llm, self.llm.llm_engine
        outputs: dict[str, Any] = {}
        ids: list[str] = []
        gc.collect()
        started_s = time.perf_counter()
        for prompt, one, context in zip(prompts, params, contexts, strict=True):
            request_id = f"bench-{next(self._ids)}"
            ids.append(request_id)
            parsed = parse_model_prompt(llm.model_config, {"prompt_token_ids": prompt})
            (rendered,) = llm.renderer.render_cmpl([parsed])
            with nullcontext() if context is None else _active(context):
                if context is not None:
                    rendered, one = _prepare(context, rendered, one, request_id)
                engine.add_request(request_id, rendered, one)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
        seconds = time.perf_counter() - started_s
        answers = [tuple(outputs[request_id].outputs[0].token_ids) for request_id in ids]
        if [len(answer) for answer in answers] != batch.output_tokens:
            raise RuntimeError("an answer has not the length that was asked for")
        readouts = sum(_readouts_of(context) for context in contexts if context is not None)
        if self.name == "hooks" and self._hook_copies() == copies:
            raise RuntimeError("the forward hooks did not run")
        self._check_files(len(prompts))
        return Done(seconds, answers, readouts)

    def profile(self, batch: Batch) -> dict[str, list[float]]:
        """What ran on the device in a run of it."""
        self.llm.collective_rpc("bench_profile_start")
        self.run(batch)
        (found,) = self.llm.collective_rpc("bench_profile_stop")
        return dict(found)

    def changed(self, batch: Batch, unasked: str) -> int:
        """In how many requests of the batch the variant's answer differs from that of the same engine unasked."""
        asked = self.run(batch).answers
        plain = self.run(Batch(unasked, batch.prompt_tokens, batch.output_tokens, batch.seed)).answers
        return sum(a != b for a, b in zip(asked, plain, strict=True))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _contexts(self, params: Sequence[Any]) -> list[Any]:
        """The request contexts of those that ask the aperture for something, as ``MiaLLM.chat`` makes them.

        The specs leave the sampling parameters, where the front end's ``prepare`` puts them resolved.
        """
        specs = [(one.extra_args or {}).get("mia") for one in params]
        if not any(specs):
            return [None] * len(params)
        from guard.mia.frontend import RequestContext
        from guard.mia.spec import parse_spec

        vectors = self.mia.vectors()
        contexts: list[Any] = []
        for text, one in zip(specs, params, strict=True):
            spec = parse_spec(text)
            self.mia.engine_config.check(spec, vectors)
            one.extra_args = None
            contexts.append(RequestContext(spec, vectors, self.mia.engine_facts))
        return contexts

    def _hook_copies(self) -> int:
        return int(self.llm.collective_rpc("bench_hook_copies")[0]) if self.name == "hooks" else 0

    def _check_files(self, expected: int) -> None:
        """Wait until vLLM's speculator has written its files, and remove them."""
        if self.files is None:
            return
        deadline_s = time.monotonic() + FILES_PATIENCE_S
        while len(written := list(self.files.glob("*.safetensors"))) < expected:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{len(written)} files of hidden states where {expected} were expected")
            time.sleep(0.01)
        for lock in self.files.glob("*.lock"):
            with lock.open() as held:  # by its writer, until the file is whole
                fcntl.flock(held, fcntl.LOCK_SH)
        for file in self.files.iterdir():
            file.unlink()


def _active(context: Any) -> Any:
    from guard.mia.frontend import active

    return active(context)


def _prepare(context: Any, rendered: Any, params: Any, request_id: str) -> tuple[Any, Any]:
    from guard.mia.frontend import prepare

    return prepare(context, rendered, params, request_id)


def _readouts_of(context: Any) -> int:
    """How many came. Raises ``RuntimeError`` when one is missing or not complete, or steering has no report."""
    readouts = context.take()
    items = {name: item for one in readouts for name, item in one.items.items()}
    wrong = {name: item.status for name, item in items.items() if item.status != "complete"}
    if wrong or items.keys() != context.spec.captures.keys():
        raise RuntimeError(f"readouts that are not complete: {wrong or sorted(context.spec.captures)}")
    if context.spec.steer and not any(one.steering for one in readouts):
        raise RuntimeError("no report of the steering")
    return len(items)


def _write_hotwire_vectors(scratch: Path) -> None:
    """The aperture's vectors in the form that hotwire reads."""
    import torch
    from safetensors.torch import load_file

    (scratch / "hotwire").mkdir(parents=True, exist_ok=True)
    for i in range(VECTORS):
        vector = load_file(scratch / "mia" / f"{vector_name(i)}.safetensors")["vector"]
        torch.save(vector, scratch / "hotwire" / f"{vector_name(i)}.pt")


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer every command. An error ends the process, after it was reported."""
    engine: Engine | None = None
    for line in commands:
        command = json.loads(line)
        kind = command.pop("command")
        started_s = time.perf_counter()
        try:
            if kind == "start":
                scratch = Path(command["scratch"])
                engine = Engine(command["engine"], load_shape(command["shape"]), command["vllm_args"], scratch)
                # What exists now stays: the collector need not walk through it between runs.
                gc.freeze()
                answer = {"start_s": time.perf_counter() - started_s, "worker": engine.report()}
                answer["pinned"] = pin_main_threads()
            elif engine is None:
                raise RuntimeError("start comes first")
            elif kind == "run":
                done = engine.run(Batch(**command))
                answer = {"seconds": done.seconds, "readouts": done.readouts}
            elif kind == "profile":
                answer = {"kernels": engine.profile(Batch(**command))}
            elif kind == "changed":
                unasked = command.pop("unasked")
                batch = Batch(**command)
                answer = {"changed": engine.changed(batch, unasked), "of": len(batch.prompt_tokens)}
            else:
                raise RuntimeError(f"no command {kind!r}")
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}) + "\n")
            answers.flush()
            break
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if engine is not None:
        engine.close()


if __name__ == "__main__":
    # vLLM logs to stdout: what it, and the processes that it starts, print goes where stderr goes.
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, own)
