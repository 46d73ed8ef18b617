"""Every generated token of up to 64 answers, at several layers, on disk: ``python examples/capture_at_scale.py``.

Short answers unless ``--tokens 1000`` says otherwise, so that it takes a minute on a CPU. Answers are written in
groups, one safetensors file each with the states and the token ids, so that no more than a group is in memory; what
was written and how fast is said after each group. Read back with safetensors alone. A run with ``--out`` that was
stopped goes on when the same command is given again: answers that are there are not asked for anew.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from arguments import refuse, whole
from door import door, parser
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import HiddenCapture, MiaSpec
from guard.uses.asking import Told
from guard.uses.hidden_states import states
from guard.uses.parts import naming
from guard.whole_file import write_whole
from guard.writable import NotWritableError, check_writable

LAYERS = (10, 20, 30)
SUBJECTS = ("a river", "a bridge", "the moon", "bread", "glass", "a violin", "rain", "a library")
TASKS = (
    "Explain how {} comes about.",
    "Write a story about {}.",
    "Describe {} to a child.",
    "List facts about {}.",
    "Write a poem about {}.",
    "What would the world be without {}?",
    "Compare {} with a mountain.",
    "Give a lecture on {}.",
)

PROMPTS = [task.format(subject) for task in TASKS for subject in SUBJECTS]
WARM_UP_TOKENS = 4
ABOUT = "run"


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, EngineConfig(hidden_layers=LAYERS))
    made.add_argument("--layers", type=whole(0), nargs="+", default=LAYERS)
    made.add_argument("--tokens", type=whole(1), default=12, help="of each answer")
    made.add_argument("--answers", type=whole(1, len(PROMPTS)), default=len(PROMPTS), help=f"at most {len(PROMPTS)}")
    made.add_argument("--group", type=whole(1), default=16, help="answers that are under way at once, and in memory")
    made.add_argument("--no-compare", action="store_true", help="do not answer everything without capture, too")
    made.add_argument("--out", type=Path, help="folder for the files; without: one that is removed at the end")
    options = made.parse_args(arguments)
    todo = list(range(options.answers)) if options.out is None else missing(options)
    if not todo:
        print(f"all {options.answers} answers are in {options.out} already")
        return
    if len(todo) < options.answers:
        print(f"{options.answers - len(todo)} of {options.answers} answers are in {options.out} already", flush=True)
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    nothing, spec, about = MiaSpec(), capture_of(options.layers), about_run(options)
    written = Written()
    plain_s = capturing_s = 0.0
    with (
        tempfile.TemporaryDirectory() as temporary,
        door(
            options,
            EngineConfig(hidden_layers=tuple(options.layers)),
            max_model_len=options.tokens + 128,
            max_num_seqs=options.group,
            kv_cache_memory_bytes=2**30,
        ) as ask,
    ):
        folder: Path = options.out or Path(temporary)
        ask([(conversations[number], nothing) for number in todo[: options.group]], WARM_UP_TOKENS, ignore_eos=True)
        for at in range(0, len(todo), options.group):
            group = todo[at : at + options.group]
            if not options.no_compare:
                began_s = time.perf_counter()
                ask([(conversations[number], nothing) for number in group], options.tokens, ignore_eos=True)
                plain_s += time.perf_counter() - began_s
            began_s = time.perf_counter()
            told = ask([(conversations[number], spec) for number in group], options.tokens, ignore_eos=True)
            for number, answer in zip(group, told, strict=True):
                with naming(f"answer {number}"):
                    written.add(path_of(folder, number), tensors(answer, options.layers), about)
            capturing_s += time.perf_counter() - began_s
            print(written.text(capturing_s), flush=True)
    compared = "" if options.no_compare else f"without capture {plain_s:.1f} s; "
    print(f"{compared}with it and the files {capturing_s:.1f} s; most memory of this process {peak_mib():.0f} MiB")


def capture_of(layers: Sequence[int]) -> MiaSpec:
    return MiaSpec(hidden={f"layer{layer}": HiddenCapture(layer=layer, positions="generated") for layer in layers})


def path_of(folder: Path, number: int) -> Path:
    return folder / f"answer-{number:04}.safetensors"


def about_run(options: argparse.Namespace) -> str:
    """What the files of a run depend on; it stands in each."""
    return json.dumps({"model": options.model, "layers": sorted(options.layers), "tokens": options.tokens})


def missing(options: argparse.Namespace) -> list[int]:
    """Numbers of the answers that are not in ``--out`` yet. A file that was cut off counts as not there; one of another
    run ends the example."""
    folder, about, todo = options.out, about_run(options), []
    try:
        check_writable(folder)
    except NotWritableError as error:
        refuse(f"--out: {error}")
    for number in range(options.answers):
        path = path_of(folder, number)
        try:
            # Opening compares what the header says with the file's size.
            with safe_open(path, "numpy") as saved:
                found = (saved.metadata() or {}).get(ABOUT)
        except (OSError, SafetensorError):
            todo.append(number)
            continue
        if found != about:
            refuse(f"--out: {path} is of another run ({found or 'it does not say which'}): give another folder")
    return todo


def tensors(answer: Told, layers: Sequence[int]) -> dict[str, np.ndarray]:
    """``layerN`` ``[tokens - 1, hidden_size]`` float32: the last token, never fed to the model, has no state. Raises
    ``UnreadableError``."""
    found = {f"layer{layer}": np.ascontiguousarray(states(answer, layer)) for layer in layers}
    return {**found, "token_ids": np.array(answer.token_ids, np.int64)}


class Written:
    """What this run has written."""

    def __init__(self) -> None:
        self.files = self.states = self.size_bytes = 0

    def add(self, path: Path, saved: dict[str, np.ndarray], about: str) -> None:
        """Raises ``NotWritableError``."""
        try:
            write_whole(path, save(saved, metadata={ABOUT: about}))
        except OSError as error:
            raise NotWritableError(f"{path}: cannot be written: {error.strerror}") from None
        self.files += 1
        self.states += sum(len(one) for name, one in saved.items() if name != "token_ids")
        self.size_bytes += path.stat().st_size

    def text(self, took_s: float) -> str:
        return (
            f"{self.files} files, {self.states} states of tokens, {self.size_bytes / 2**20:.1f} MiB, "
            f"{self.states / took_s:.0f} states/s"
        )


def peak_mib() -> float:
    """Of this process; the model is in another one."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
