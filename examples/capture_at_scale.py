"""Every generated token of 64 answers, at several layers, on disk: ``python examples/capture_at_scale.py``.

Short answers unless ``--tokens 2000`` says otherwise, so that it takes a minute on a CPU. Answers are written in
groups, one safetensors file each with the states and the token ids, so that no more than a group is in memory. Read
back with safetensors alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from door import model_folder, parser
from safetensors import safe_open
from safetensors.numpy import save_file

from guard.mia import MiaLLM
from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer
from guard.mia.results import RowsReadout
from guard.mia.spec import HiddenCapture, MiaSpec

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


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser(__doc__)
    made.add_argument("--layers", type=int, nargs="+", default=[10, 20, 30])
    made.add_argument("--tokens", type=int, default=12, help="of each answer")
    made.add_argument("--answers", type=int, default=64)
    made.add_argument("--group", type=int, default=16, help="answers that are under way at once, and in memory")
    made.add_argument("--out", type=Path, help="folder for the files; without: one that is removed at the end")
    options = made.parse_args(arguments)
    prompts = [task.format(subject) for task in TASKS for subject in SUBJECTS][: options.answers]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    spec = MiaSpec(
        hidden={f"layer{layer}": HiddenCapture(layer=layer, positions="generated") for layer in options.layers}
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with MiaLLM(
            model_folder(options.model),
            EngineConfig(hidden_layers=tuple(options.layers)),
            dtype="float32",
            max_model_len=options.tokens + 128,
            max_num_seqs=options.group,
            kv_cache_memory_bytes=2**30,
        ) as llm:
            sampling = {"max_tokens": options.tokens, "ignore_eos": True}
            llm.chat(conversations[: options.group], MiaSpec(), **sampling)  # warms up
            plain_s = capturing_s = 0.0
            for at in range(0, len(conversations), options.group):
                group = conversations[at : at + options.group]
                began_s = time.perf_counter()
                llm.chat(group, MiaSpec(), **sampling)
                plain_s += time.perf_counter() - began_s
                began_s = time.perf_counter()
                for number, answer in enumerate(llm.chat(group, spec, **sampling), start=at):
                    save_file(tensors(answer), folder / f"answer-{number:04}.safetensors")
                capturing_s += time.perf_counter() - began_s
        report(folder, plain_s, capturing_s)


def tensors(answer: Answer) -> dict[str, np.ndarray]:
    """``layerN`` ``[tokens - 1, hidden_size]`` float32: the last token, never fed to the model, has no state."""
    found = {}
    for name, item in answer.items.items():
        if not isinstance(item, RowsReadout) or item.status != "complete" or item.values is None:
            raise RuntimeError(f"{name}: {item.status} {item.reason}")
        found[name] = np.ascontiguousarray(item.values)
    return {**found, "token_ids": np.array(answer.token_ids, np.int64)}


def report(folder: Path, plain_s: float, capturing_s: float) -> None:
    files = sorted(folder.glob("answer-*.safetensors"))
    rows = 0
    for file in files:
        with safe_open(file, "numpy") as saved:
            rows += sum(len(saved.get_tensor(name)) for name in saved.keys() if name != "token_ids")  # noqa: SIM118
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {rows} states of tokens, {size / 2**20:.1f} MiB")
    print(
        f"without capture {plain_s:.1f} s; with it and the files {capturing_s:.1f} s, {rows / capturing_s:.0f} states/s"
    )


if __name__ == "__main__":  # vLLM starts processes of its own
    main()
