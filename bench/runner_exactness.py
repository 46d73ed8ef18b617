"""Prints how far readouts and steering on a GPU are from transformers in float32 on the CPU, tiny random models.

Owns the numbers of ``bench/results/*-exactness.txt``; tests of the same things on the CPU are in ``tests/engine``. Runs
on a machine without pytest, and prints instead of asserting. Every line is: architecture, dtype, what, numbers.

    VLLM_USE_V2_MODEL_RUNNER=1 python -m bench.runner_exactness llama float32
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from vllm.v1.metrics.reader import Counter

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle

LAYERS, HEADS = (1, 2, 3), tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
HIDDEN = {f"h{layer}": {"layer": layer} for layer in LAYERS}
READ = {
    "spans": {"instruction": "system", "data": "user.last"},
    "hidden": HIDDEN,
    "attention": {"a": {"heads": HEADS, "spans": ["instruction", "data"], "weights": True}},
}
GENERATED = {"heads": HEADS, "spans": ["instruction", "data"], "weights": True, "positions": "generated"}
ROWS = {"hidden": {"all": {"layer": 2, "positions": "all"}}}
# 46 to 394 tokens, in steps of at most 128: chunks, and prompts of unequal length in one batch.
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there " * n}] for n in (1, 4, 17, 30)
]
LONG = [[{"role": "user", "content": f"{n} " + "tell me a story " * (3 + n % 7)}] for n in range(8)]


@dataclass
class Subject:
    """One model in one dtype. ``vector`` is the steering vector ``push``."""

    architecture: str
    dtype: str
    folder: Path
    vectors: Path
    vector: np.ndarray

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            hidden_layers=LAYERS,
            attention_heads=HEADS,
            max_hidden_rows_per_step=512,
            steering_layers=LAYERS,
            steering_folder=self.vectors,
            steering_vectors=("push",),
        )

    def say(self, what: str, *numbers: object) -> None:
        print(self.architecture, self.dtype, what, *numbers, flush=True)

    def truth(self, prompts: Iterable[Sequence[int]], *pushes: oracle.Push) -> list[oracle.Reading]:
        return oracle.read(self.folder, [list(ids) for ids in prompts], *pushes)


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def errors(subject: Subject, answer: Answer, *pushes: oracle.Push) -> str:
    """Relative error of each layer's hidden vector; largest error of an attention mass and of a probability."""
    (truth,) = subject.truth([answer.prompt_token_ids], *pushes)
    items: Any = answer.items
    assert all(item.status == "complete" for item in items.values()), items
    assert items["h1"].token_id == answer.prompt_token_ids[-1]
    hidden = [relative(items[f"h{layer}"].values, truth.hidden[layer - 1][-1]) for layer in LAYERS]
    text = "hidden " + " ".join(f"{error:.1e}" for error in hidden)
    if "a" not in items:
        return text
    rows = np.stack([truth.attention[layer - 1][head, -1] for layer, head in HEADS])
    mass = [
        np.abs(values - rows[:, tokens_of(answer, span)].sum(axis=1)).max() for span, values in items["a"].mass.items()
    ]
    return f"{text} attention mass {max(mass):.1e} probability {np.abs(items['a'].weights - rows).max():.1e}"


def tokens_of(answer: Answer, span: str) -> list[int]:
    return [t for start, end in answer.readouts[0].span_tokens[span] for t in range(start, end)]


def chat(llm: MiaLLM, spec: Any, conversations: Any = CONVERSATIONS, **sampling: Any) -> list[Answer]:
    specs = [MiaSpec.model_validate(one) for one in spec] if isinstance(spec, list) else MiaSpec.model_validate(spec)
    return llm.chat(conversations, specs, **{"max_tokens": 8, "ignore_eos": True, **sampling})


def say_errors(subject: Subject, what: str, answers: list[Answer], pushes: Callable[[int], list[oracle.Push]]) -> None:
    for i, answer in enumerate(answers):
        subject.say(what, f"{len(answer.prompt_token_ids)} tokens:", errors(subject, answer, *pushes(i)))


def metric(llm: MiaLLM, name: str) -> float:
    return sum(m.value for m in llm.llm.get_metrics() if isinstance(m, Counter) and m.name == name)


def readouts(subject: Subject, llm: MiaLLM) -> None:
    say_errors(subject, "one batch, chunked,", chat(llm, READ), lambda _: [])


def prefix_hit(subject: Subject, llm: MiaLLM) -> None:
    before = metric(llm, "vllm:prefix_cache_hits")
    answers = chat(llm, {"hidden": HIDDEN})
    subject.say("prefix cache:", f"{metric(llm, 'vllm:prefix_cache_hits') - before:.0f} prompt tokens came from it")
    say_errors(subject, "after a prefix-cache hit,", answers, lambda _: [])


def steering(subject: Subject, llm: MiaLLM) -> None:
    for method, coefficient, target in (("add_vector", 3.0, None), ("project", 1.0, 4.0), ("replace", 0.7, None)):
        steer = {"vector": "push", "layer": 2, "coefficient": coefficient, "method": method}
        spec = READ | {"steer": [steer | ({} if target is None else {"target": target})]}
        push = [oracle.Push(2, coefficient, subject.vector, method, target or 0.0)]
        answers = chat(llm, [spec if i % 2 == 0 else READ for i in range(len(CONVERSATIONS))])
        pushes = [push if i % 2 == 0 else [] for i in range(len(CONVERSATIONS))]
        say_errors(subject, f"every other request steered by {method},", answers, pushes.__getitem__)


def generated(subject: Subject, llm: MiaLLM) -> None:
    """Attention from each generated token: the keys of prompt and answer together."""
    for answer in chat(llm, {"spans": READ["spans"], "attention": {"g": GENERATED}}):
        ids = answer.prompt_token_ids + answer.token_ids[:-1]
        got: Any = answer.items["g"]
        assert (got.status, got.positions) == ("complete", tuple(range(len(answer.prompt_token_ids), len(ids))))
        (truth,) = subject.truth([ids])
        rows = np.stack([truth.attention[layer - 1][head, list(got.positions)] for layer, head in HEADS], axis=1)
        mass = max(
            np.abs(values - rows[:, :, tokens_of(answer, span)].sum(axis=2)).max() for span, values in got.mass.items()
        )
        numbers = f"attention mass {mass:.1e} probability {np.abs(got.weights - rows).max():.1e}"
        subject.say("generated tokens after", len(answer.prompt_token_ids), "tokens:", numbers)


def choices(subject: Subject, llm: MiaLLM) -> None:
    for answer in chat(llm, ROWS, n=2, temperature=1.0):
        finals: Any = [r for r in answer.readouts if r.stage == "final"]
        assert sorted(r.choice_index for r in finals) == [0, 1]
        texts = [r.items["all"].token_ids for r in finals]
        assert texts[0] != texts[1]
        errors = [
            relative(r.items["all"].values, truth.hidden[1])
            for r, truth in zip(finals, subject.truth(texts), strict=True)
        ]
        subject.say("two choices, all rows of each,", *(f"{error:.1e}" for error in errors))


def preemption(subject: Subject, llm: MiaLLM) -> None:
    before = metric(llm, "vllm:num_preemptions")
    answers = chat(llm, ROWS, LONG, max_tokens=220)
    subject.say("preemptions:", f"{metric(llm, 'vllm:num_preemptions') - before:.0f}")
    for answer in answers:
        ids = answer.prompt_token_ids + answer.token_ids[:-1]
        rows: Any = answer.items["all"]
        whole = rows.positions == tuple(range(len(ids))) and rows.token_ids == ids
        (truth,) = subject.truth([ids])
        subject.say(
            "preempted,",
            len(ids),
            "rows",
            "all once" if whole else "WRONG",
            f"{relative(rows.values, truth.hidden[1]):.1e}",
        )


def idle(subject: Subject) -> None:
    """Tokens and logprobs of vLLM itself, and of an engine whose taps nobody uses."""
    from vllm import SamplingParams

    def answers(llm: Any) -> list[Any]:
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
        outputs = llm.chat(CONVERSATIONS, params, use_tqdm=False)
        return [(tuple(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]

    with engines.in_process():
        from vllm import LLM

        llm = LLM(model=str(subject.folder), enforce_eager=True, **arguments(subject))
        expected = answers(llm)
        llm.llm_engine.engine_core.shutdown()
    with engines.engine(subject.folder, subject.config, **arguments(subject)) as mia:
        subject.say("idle taps:", "tokens and logprobs as without" if answers(mia.llm) == expected else "WRONG")


def arguments(subject: Subject) -> dict[str, Any]:
    return engines.DEFAULTS | {"dtype": subject.dtype, "gpu_memory_utilization": 0.05, "disable_log_stats": False}


def yardstick(subject: Subject) -> None:
    """What transformers itself loses in the dtype, on the same prompts: the least to expect of any engine."""
    prompts = [list(range(5, 5 + length)) for length in (46, 82, 238)]
    layers = oracle._pool().submit(_hidden_in, subject.folder, prompts, subject.dtype).result()
    for mine, truth in zip(layers, subject.truth(prompts), strict=True):
        errors = [relative(mine[layer - 1], truth.hidden[layer - 1][-1]) for layer in LAYERS]
        subject.say("transformers in this dtype on the CPU,", *(f"{error:.1e}" for error in errors))


def _hidden_in(folder: Path, prompts: list[list[int]], dtype: str) -> list[list[np.ndarray]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    (blocks,) = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(LAYERS))
    seen: list[np.ndarray] = []
    for block in blocks:
        block.register_forward_hook(
            lambda _m, _i, out: seen.append((out[0] if isinstance(out, tuple) else out)[0, -1].float().numpy().copy())
        )
    with torch.no_grad():
        for ids in prompts:
            model(torch.tensor([ids]), use_cache=False)
    return [seen[i : i + len(LAYERS)] for i in range(0, len(seen), len(LAYERS))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture")
    parser.add_argument("dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--small-pool", type=int, default=120, help="KV blocks in the preemption part")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    engines.ENVIRONMENT["VLLM_USE_V2_MODEL_RUNNER"] = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1")
    folder = oracle.save(options.architecture, Path(tempfile.mkdtemp(prefix="tiny-")))
    vectors = Path(tempfile.mkdtemp(prefix="vectors-"))
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    save_file({"vector": vector}, vectors / "push.safetensors")
    subject = Subject(options.architecture, options.dtype, folder, vectors, vector.numpy())
    failed = []

    def part(run: Callable[..., None], *args: Any) -> None:
        """One part's failure must not cost the others on a borrowed machine; it is printed and makes the exit code."""
        try:
            run(subject, *args)
        except Exception:
            traceback.print_exc()
            failed.append(run.__name__)

    with engines.engine(folder, subject.config, **arguments(subject)) as llm:
        core: Any = llm.llm.llm_engine.engine_core
        runner = core.engine_core.model_executor.driver_worker.worker.model_runner
        backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
        subject.say("runner:", f"{type(runner).__module__}, {', '.join(sorted(backends))}")
        for run in (readouts, prefix_hit, steering, generated, choices):
            part(run, llm)
    pool = arguments(subject) | {"num_gpu_blocks_override": options.small_pool}
    with engines.engine(folder, subject.config, **pool) as llm:
        part(preemption, llm)
    part(idle)
    if options.dtype != "float32":
        part(yardstick)
    subject.say("failed parts:", *(failed or ["none"]))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
