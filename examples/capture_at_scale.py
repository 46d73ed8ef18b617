"""Every generated token of up to 64 answers, at several layers, on disk: ``python examples/capture_at_scale.py``.

Short answers unless ``--tokens 1000`` says otherwise, so that it takes a minute on a CPU. Answers are written in
groups, one safetensors file each with the states and the token ids, so that no more than a group is in memory; what
was written and how fast is said after each group. Read back with safetensors alone.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from door import door, parser
from safetensors.numpy import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.spec import HiddenCapture, MiaSpec
from guard.uses.asking import Told
from guard.uses.hidden_states import states
from guard.uses.parts import naming

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


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__, EngineConfig(hidden_layers=LAYERS))
    made.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    made.add_argument("--tokens", type=int, default=12, help="of each answer")
    made.add_argument("--answers", type=int, default=len(PROMPTS), help=f"at most {len(PROMPTS)}")
    made.add_argument("--group", type=int, default=16, help="answers that are under way at once, and in memory")
    made.add_argument("--no-compare", action="store_true", help="do not answer everything without capture, too")
    made.add_argument("--out", type=Path, help="folder for the files; without: one that is removed at the end")
    options = made.parse_args(arguments)
    if not 1 <= options.answers <= len(PROMPTS):
        made.error(f"--answers is between 1 and {len(PROMPTS)}: there are no more prompts")
    if options.out and any(options.out.glob("answer-*.safetensors")):
        made.error(f"{options.out} has answers of an earlier run: give another folder")
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[: options.answers]]
    nothing, spec = MiaSpec(), capture_of(options.layers)
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
        folder.mkdir(parents=True, exist_ok=True)
        ask([(one, nothing) for one in conversations[: options.group]], WARM_UP_TOKENS, ignore_eos=True)
        for at in range(0, len(conversations), options.group):
            group = conversations[at : at + options.group]
            if not options.no_compare:
                began_s = time.perf_counter()
                ask([(one, nothing) for one in group], options.tokens, ignore_eos=True)
                plain_s += time.perf_counter() - began_s
            began_s = time.perf_counter()
            told = ask([(one, spec) for one in group], options.tokens, ignore_eos=True)
            for number, answer in enumerate(told, start=at):
                with naming(f"answer {number}"):
                    written.add(folder / f"answer-{number:04}.safetensors", tensors(answer, options.layers))
            capturing_s += time.perf_counter() - began_s
            print(written.text(capturing_s), flush=True)
    compared = "" if options.no_compare else f"without capture {plain_s:.1f} s; "
    print(f"{compared}with it and the files {capturing_s:.1f} s; most memory of this process {peak_mib():.0f} MiB")


def capture_of(layers: Sequence[int]) -> MiaSpec:
    return MiaSpec(hidden={f"layer{layer}": HiddenCapture(layer=layer, positions="generated") for layer in layers})


def tensors(answer: Told, layers: Sequence[int]) -> dict[str, np.ndarray]:
    """``layerN`` ``[tokens - 1, hidden_size]`` float32: the last token, never fed to the model, has no state. Raises
    ``UnreadableError``."""
    found = {f"layer{layer}": np.ascontiguousarray(states(answer, layer)) for layer in layers}
    return {**found, "token_ids": np.array(answer.token_ids, np.int64)}


class Written:
    """What this run has written."""

    def __init__(self) -> None:
        self.files = self.states = self.size_bytes = 0

    def add(self, path: Path, saved: dict[str, np.ndarray]) -> None:
        save_file(saved, path)
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
