"""The benchmark's arithmetic, its report, and a rehearsal of every variant that a CPU can run."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench import courier, goals, load_client, report
from bench.aperture import arguments, weights
from bench.children import ChildError
from bench.compact import compact
from bench.device_time import beside, steps
from bench.engine_child import Batch, Engine, serve, token_ids
from bench.offline import batches, check_steering, kernels
from bench.plot import points
from bench.ratios import Case, loads, of_medians, paired, per_token_ms, saturated_tokens_per_s
from bench.report import sections
from bench.run import WARM_UP, Run, empty_results
from bench.served import OURS, columns, server_command, with_tokenizer
from bench.shapes import Shape, load_shape
from bench.shares import Shares
from bench.variants import ON_CPU, SERVED, VARIANTS, VECTORS, EngineName, engine_start, taps_of, write_weights
from bench.workload import Arrival, lengths, poisson
from guard.mia.metrics import LAG_BUCKETS_S
from guard.mia.spec import parse_spec
from tests.engine.engines import in_process

SHAPES = [load_shape(name) for name in ("llama8b", "qwen1p5b", "tiny")]
TINY = SHAPES[-1]


def row(
    variant: str, repetition: int, tokens: int, seconds: float, requests: int = 1, phase: str = "tpot"
) -> dict[str, Any]:
    return {
        "model": "tiny",
        "phase": phase,
        "variant": variant,
        "repetition": repetition,
        "requests": requests,
        "prompt_tokens": 16 * requests,
        "output_tokens": tokens * requests,
        "seconds": seconds,
    }


def pair(variant: str, repetition: int, short_s: float, long_s: float, requests: int = 1) -> list[dict[str, Any]]:
    return [row(variant, repetition, 1, short_s, requests), row(variant, repetition, 101, long_s, requests)]


CASE = Case("tiny", "tpot", 1, 16)


# Ratios


def test_the_time_of_a_token_is_what_a_longer_run_takes_more() -> None:
    found = per_token_ms(pair("vanilla", 0, 0.5, 1.5, requests=8), "tpot")
    assert found == {Case("tiny", "tpot", 8, 16): {"vanilla": {0: pytest.approx(10.0)}}}


def test_a_run_without_its_partner_gives_no_time() -> None:
    assert per_token_ms([row("vanilla", 0, 101, 1.0)], "tpot") == {}


def test_a_long_run_that_was_the_shorter_gives_no_time() -> None:
    found = per_token_ms([*pair("vanilla", 0, 1.0, 0.9), *pair("vanilla", 1, 0.5, 1.5)], "tpot")
    assert found[CASE]["vanilla"] == {1: pytest.approx(10.0)}


def test_a_ratio_is_taken_within_a_round_and_then_the_median() -> None:
    # The second round is twice as slow for both: paired it is no spread at all, unpaired it would be 2.
    rows = [*pair("vanilla", 0, 0, 1.0), *pair("idle", 0, 0, 1.01)]
    rows += [
        *pair("vanilla", 1, 0, 2.0),
        *pair("idle", 1, 0, 2.02),
        *pair("vanilla", 2, 0, 1.0),
        *pair("idle", 2, 0, 1.05),
    ]
    rows += pair("idle", 3, 0, 9.0)
    values = per_token_ms(rows, "tpot")[CASE]
    ratio = paired(values["idle"], values["vanilla"])
    assert ratio is not None
    assert (ratio.middle, ratio.low, ratio.high) == pytest.approx((1.01, 1.01, 1.05))
    assert ratio.count == 3


def test_no_common_round_gives_no_ratio() -> None:
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_throughput_counts_all_requests_of_a_run() -> None:
    rows = [{**row("idle", 0, 50, 2.0, requests=4, phase="saturated"), "prompt_tokens": 37}]
    assert saturated_tokens_per_s(rows) == {Case("tiny", "saturated", 4, None): {"idle": {0: 100.0}}}


def window(variant: str, first_s: list[float | None], **more: Any) -> dict[str, Any]:
    """A served window: every answer of 11 tokens, 10 ms apart, sent a second after the other."""
    answers = [
        {
            "sent_s": float(i),
            "output_tokens": 11,
            "first_token_s": first,
            "last_token_s": None if first is None else first + 0.1,
            "readout_s": None,
            "error": "" if first is not None else "500: no",
        }
        for i, first in enumerate(first_s)
    ]
    return {
        "model": "tiny",
        "variant": variant,
        "rate_per_s": 1.0,
        "repetition": 0,
        "answers": columns(answers),
        **more,
    }


def test_a_served_answer_that_failed_is_an_error_and_no_time() -> None:
    load = loads([window("vanilla", [0.4, None, 0.9])])["tiny", 1.0]["vanilla"]
    assert load.errors == 1
    assert load.first_token_s == [0.4, None, 0.9]
    assert load.per_token_s == [pytest.approx(0.01), None, pytest.approx(0.01)]
    assert load.tokens_per_s == pytest.approx(22 / (2 + 1.0))


def test_rounds_of_a_served_load_follow_each_other() -> None:
    later = window("vanilla", [0.5], repetition=1)
    assert loads([later, window("vanilla", [0.4])])["tiny", 1.0]["vanilla"].first_token_s == [0.4, 0.5]


def test_a_ratio_of_medians_is_of_the_requests_that_both_answered() -> None:
    ratio = of_medians([1.0, None, 2.0, 4.0], [2.0, 100.0, 4.0, 8.0])
    assert ratio is not None
    assert (ratio.middle, ratio.low, ratio.high, ratio.count) == (0.5, 0.5, 0.5, 3)


def test_the_bootstrap_is_wider_the_more_the_requests_differ() -> None:
    rng = random.Random(0)  # noqa: S311
    base = [1.0] * 200

    def width(noise: float) -> float:
        ratio = of_medians([1 + rng.uniform(-noise, noise) for _ in base], list(base))
        assert ratio is not None
        assert ratio.low <= ratio.middle <= ratio.high
        return ratio.high - ratio.low

    assert 0 < width(0.01) < width(0.5) / 5


# Time


class Clock:
    """A clock that rounds of work move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> Any:
        def round_of(repetition: int) -> None:
            self.now_s += seconds

        return round_of


def test_phases_share_what_is_left_by_weight_and_pass_on_what_they_do_not_use() -> None:
    clock = Clock()
    shares = Shares({"a": 1, "b": 3, "c": 1}, 100.0, clock)
    assert shares.repeat("a", 2, clock.work(5)) == 2  # 10 of its 20 s
    assert shares.repeat("b", 99, clock.work(10)) == 6  # 3/4 of the 90 s left are 67.5 s
    assert shares.repeat("c", 99, clock.work(10)) == 3
    assert clock.now_s == 100.0


def test_a_phase_makes_one_round_unless_the_deadline_has_passed() -> None:
    clock = Clock()
    shares = Shares({"a": 1, "b": 1, "c": 1}, 10.0, clock)
    assert shares.repeat("a", 5, clock.work(9)) == 1
    assert shares.repeat("b", 5, clock.work(9)) == 1
    assert shares.repeat("c", 5, clock.work(9)) == 0


def test_every_phase_that_runs_has_a_share_in_its_order() -> None:
    options = arguments(["--model", "llama8b", "--model", "qwen1p5b", "--phases", "served", "tpot", "ttft"])
    ordered = weights(options, SHAPES[:2])
    assert list(ordered) == [
        "tpot/llama8b", "tpot/qwen1p5b", "ttft/llama8b", "ttft/qwen1p5b", "restart", "served/llama8b",
    ]  # fmt: skip
    assert ordered["tpot/qwen1p5b"] < ordered["tpot/llama8b"]


def test_a_rehearsal_is_quick_and_says_so_only_when_asked() -> None:
    assert arguments(["--model", "tiny", "--quick"]).output_tokens < 10
    assert arguments(["--model", "tiny", "--quick", "--output-tokens", "99"]).output_tokens == 99
    assert arguments(["--model", "tiny"]).output_tokens == 256


# Workload


def test_arrivals_come_at_the_rate_in_order_and_the_same_each_time() -> None:
    arrivals = poisson(64, 100, seed=3)
    assert arrivals == poisson(64, 100, seed=3) != poisson(64, 100, seed=4)
    assert len(arrivals) == pytest.approx(6400, rel=0.05)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[-1] < 100


def test_a_window_is_never_empty() -> None:
    assert all(len(poisson(0.01, 1.0, seed)) == 1 for seed in range(5))


def test_lengths_are_cut_where_asked() -> None:
    prompts, answers = lengths(500, seed=0, longest=20)
    assert max(prompts) == max(answers) == 20
    assert sum(lengths(5000, 0)[0]) / 5000 == pytest.approx(185, rel=0.05)


def test_no_two_prompts_are_alike() -> None:
    prompts = [tuple(token_ids(TINY, 16, seed, i)) for seed in range(20) for i in range(64)]
    assert len(set(prompts)) == len(prompts)
    assert all(0 <= token < TINY.vocabulary for prompt in prompts for token in prompt)


# Variants


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_engine_has_a_tap_for_everything_that_a_variant_asks(shape: Shape, tmp_path: Path) -> None:
    taps = taps_of(shape)
    config = taps.engine_config(tmp_path)
    assert len(taps.hidden_layers) == 3
    assert all(head < shape.heads and layer <= shape.layers for layer, head in taps.attention_heads)
    for variant in [*VARIANTS.values(), *SERVED.values()]:
        asked = [variant.ask(taps, i, 128) for i in range(VECTORS)]
        specs = [parse_spec(extra["mia"]) for extra in asked if extra is not None and "mia" in extra]
        assert len(specs) == (VECTORS if variant.engine == "mia" and "idle" not in variant.name else 0)
        for spec in specs:
            config.check(spec)
        vectors = Counter(steer.vector for spec in specs for steer in spec.steer)
        assert set(vectors.values()) <= {1}, "each request of a batch has its own"


def test_the_8b_shape_has_16_attention_heads_in_4_layers() -> None:
    heads = taps_of(SHAPES[0]).attention_heads
    assert (len(set(heads)), len({layer for layer, _ in heads})) == (16, 4)


def test_hotwire_is_asked_for_the_same_block_counted_from_0() -> None:
    taps = taps_of(SHAPES[0])
    asked = VARIANTS["hotwire_steered"].ask(taps, 5, 128)
    assert asked is not None
    assert json.loads(asked["hotwire"]) == {"id": "v05", "layer": taps.steering_layer - 1, "scale": 1.0}


def starts(shape: Shape, scratch: Path, device: Any = "cuda") -> dict[EngineName, Any]:
    names = dict.fromkeys(variant.engine for variant in VARIANTS.values())
    how = {"device": device, "kv_tokens": 8192, "max_num_batched_tokens": 512, "scratch": scratch, "peers": scratch}
    return {name: engine_start(name, shape, **how) for name in names}


def test_engines_start_alike_but_for_what_makes_them_themselves(tmp_path: Path) -> None:
    found = starts(SHAPES[0], tmp_path)
    base = found["vanilla"].vllm_args
    differ = {
        name: {key for key in how.vllm_args.keys() | base.keys() if how.vllm_args.get(key) != base.get(key)}
        for name, how in found.items()
    }
    assert differ == {
        "vanilla": set(),
        "mia": set(),
        "hotwire": set(),
        "hooks": {"enforce_eager"},
        "extract": {"speculative_config", "kv_transfer_config"},
    }
    plugins = {name: how.environment["VLLM_PLUGINS"] for name, how in found.items()}
    assert plugins == {"vanilla": "none", "mia": "mia", "hotwire": "hotwire", "hooks": "none", "extract": "none"}


def test_the_kv_cache_has_room_for_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    # 32 layers, keys and values, 8 heads of 128 values of 2 bytes.
    assert starts(SHAPES[0], tmp_path)["vanilla"].vllm_args["kv_cache_memory_bytes"] == 8192 * 32 * 2 * 8 * 128 * 2


# Servers and their client


def test_vllms_server_is_ours_without_what_is_ours(tmp_path: Path) -> None:
    ours, theirs = (
        server_command(name, TINY, tmp_path, tmp_path, tmp_path / "log", device="cpu", kv_tokens=1024)
        for name in ("mia", "vanilla")
    )
    assert not any("mia" in argument.replace(str(tmp_path), "") for argument in theirs.arguments)
    removed = [argument for argument in ours.arguments if argument not in theirs.arguments]
    assert [argument for argument in removed if argument.startswith("--")] == list(OURS)
    assert theirs.environment["VLLM_PLUGINS"] == "none" != ours.environment.get("VLLM_PLUGINS")


def test_the_servers_tokenizer_knows_every_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(with_tokenizer(TINY, tmp_path / "model"))
    assert str(tokenizer.decode([100, TINY.vocabulary - 1])).split() == ["w100", f"w{TINY.vocabulary - 1}"]


def test_of_each_kind_of_event_the_client_notes_when_it_came() -> None:
    observed = load_client.Observed(at_s=0, sent_s=0, prompt_tokens=1, output_tokens=3)
    token, readouts = b'data: {"id":"cmpl-1"}', b'data: {"object": "mia.readouts"}'
    for now_s, event in enumerate([readouts, token, token, token, readouts, b"data: [DONE]", b""], start=1):
        load_client.note(observed, event, float(now_s))
    times = (observed.readout_s, observed.first_token_s, observed.last_token_s, observed.token_events)
    assert times == (1.0, 2.0, 4.0, 3)


async def test_the_client_notes_readouts_first_and_last_token_of_a_stream_cut_anywhere() -> None:
    seen: list[Any] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        events = [
            b'data: {"object": "mia.readouts", "readouts": []}\n\n',
            b'data: {"id":"cmpl-1","choices":[]}\n\ndata: {"i',
            b'd":"cmpl-1","choices":[]}\n\n',
            b'data: {"object": "mia.readouts", "readouts": []}\n\ndata: [DONE]\n\n',
        ]
        for event in events:
            await answer.write(event)
            await asyncio.sleep(0.01)
        return answer

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=503, text="busy")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/busy/v1/completions", refuse)
    async with TestServer(app) as server:
        arrivals = [asdict(Arrival(at_s=0.01, prompt_tokens=12, output_tokens=2))]
        plan: dict[str, Any] = {
            "url": str(server.make_url("")).rstrip("/"),
            "shape": "tiny",
            "variant": "guarded",
            "seed": 7,
        }
        (answer,) = await load_client.main({**plan, "arrivals": arrivals})
        busy = await load_client.main({**plan, "url": plan["url"] + "/busy", "arrivals": arrivals})
    assert answer.error == ""
    assert answer.token_events == 2
    assert answer.readout_s is not None
    assert answer.first_token_s is not None
    assert answer.last_token_s is not None
    assert answer.readout_s <= answer.first_token_s <= answer.last_token_s
    assert answer.sent_s >= answer.at_s
    assert len(seen[0]["prompt"]) == arrivals[0]["prompt_tokens"]
    assert parse_spec(seen[0]["vllm_xargs"]["mia"]).attention
    assert busy[0].error == "503: busy"
    assert busy[0].first_token_s is None


# A run


class FakeChild:
    """An engine that takes ``tokens * ms`` for each request's tokens, until it fails."""

    def __init__(self, ms: float, fails_after: int = 1000, changed: int = 1) -> None:
        self.ms, self.left, self.changed = ms, fails_after, changed
        self.asked: list[dict[str, Any]] = []
        self.closed = False

    def ask(self, command: str, limit_s: float, **fields: Any) -> dict[str, Any]:
        self.left -= 1
        if self.left < 0:
            raise ChildError("CUDA error")
        self.asked.append(fields)
        if command == "changed":
            return {"changed": self.changed, "of": len(fields["prompt_tokens"])}
        if command == "profile":
            steps = fields["output_tokens"][0]
            return {"kernels": {"prefill": [1, 500.0], "gemm": [4 * steps, self.ms * steps], "tap": [0, 0.0]}}
        return {"seconds": max(fields["output_tokens"]) * self.ms / 1e3, "readouts": 0}

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def run_of(tmp_path: Path, children: dict[EngineName, FakeChild], **options: Any) -> Run:
    given = vars(arguments(["--model", "tiny", "--device", "cpu", "--quick"])) | options
    return Run(
        argparse.Namespace(**given),
        [TINY],
        Shares({}, 1e12),
        tmp_path,
        tmp_path,
        tmp_path / "out.json",
        {
            "options": {"quick": True},
            "card": "none",
            "commit": "0",
            "time": "",
            "cpus": 1,
            "versions": {},
            "command": [],
            "taps": {},
            **empty_results(),
        },
        random.Random(0),  # noqa: S311
        {("tiny", name): child for name, child in children.items()},  # type: ignore[misc]
    )


def test_a_round_asks_all_variants_for_the_same_and_the_next_for_something_else(tmp_path: Path) -> None:
    children = {"vanilla": FakeChild(2.0), "mia": FakeChild(2.2)}
    run = run_of(tmp_path, children)  # type: ignore[arg-type]
    for repetition in (WARM_UP, 0, 1):
        batches(run, TINY, "tpot", ["vanilla", "idle"], repetition)
    recorded = per_token_ms(run.results["rows"], "tpot")[CASE]
    assert recorded == {"vanilla": pytest.approx({0: 2.0, 1: 2.0}), "idle": pytest.approx({0: 2.2, 1: 2.2})}
    seeds = [sorted((one["seed"], *one["output_tokens"]) for one in child.asked) for child in children.values()]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == len(seeds[0])


def test_a_step_on_the_device_is_what_a_longer_run_takes_more(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"vanilla": FakeChild(2.0), "mia": FakeChild(2.5)}, batch=[8])
    for repetition in (WARM_UP, 0):
        kernels(run, TINY, ["vanilla", "idle"], repetition)
    found = {one.variant: one for one in steps(run.results["kernels"])}
    vanilla, idle = found["vanilla"], found["idle"]
    assert vanilla.kernels == {"prefill": (0, 0), "gemm": (4, 2), "tap": (0, 0)}
    assert idle.whole == (4, 2.5)
    assert beside(idle, vanilla)[0] == ("gemm", (0, 0.5))
    assert "| taps in place, nothing asked | 4.0 | 2.5 | `gemm` +0.5 (+0)" in "\n".join(sections(run.results))


def test_a_profile_without_its_partner_is_no_step() -> None:
    one = {"model": "tiny", "variant": "idle", "requests": 1, "output_tokens": 1, "kernels": {"gemm": [4, 2.0]}}
    assert steps([one]) == []


def test_several_requests_make_no_step_that_compares() -> None:
    one = {"model": "tiny", "variant": "idle", "requests": 8, "kernels": {"gemm": [4, 2.0]}}
    assert steps([{**one, "output_tokens": tokens} for tokens in (1, 17)]) == []


def test_an_engine_that_fails_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    children = {"vanilla": FakeChild(2.0), "mia": FakeChild(2.2, fails_after=3)}
    run = run_of(tmp_path, children)  # type: ignore[arg-type]
    for repetition in (0, 1):
        batches(run, TINY, "tpot", ["vanilla", "idle"], repetition)
    assert children["mia"].closed
    assert len([one for one in run.results["rows"] if one["variant"] == "vanilla"]) == 8
    assert run.results["failures"] == {"tiny/idle": "CUDA error"}


def test_steering_that_changes_nothing_is_a_failure(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"mia": FakeChild(1.0, changed=0)})
    check_steering(run, TINY)
    assert set(run.results["failures"]) == {"tiny/steered", "tiny/all"}


def test_an_engines_process_reports_an_error_and_ends() -> None:
    answers = io.StringIO()
    serve(io.StringIO('{"command": "run"}\n{"command": "run"}\n'), answers)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"error": "RuntimeError: start comes first"}
    ]


# The report


def measured(tmp_path: Path, idle_ms: float) -> dict[str, Any]:
    """Results of a run with known numbers."""
    run = run_of(tmp_path, {"vanilla": FakeChild(2.0), "mia": FakeChild(idle_ms)})
    for repetition in (0, 1):
        batches(run, TINY, "tpot", ["vanilla", "idle"], repetition)
    run.results["served"] = [window("vanilla", [0.4, 0.5]), window("guarded", [0.4, 0.5])]
    run.fail("tiny/extract", "log\nValueError: no")
    run.save()
    results: dict[str, Any] = json.loads(run.out.read_text())
    return results


def test_a_miss_is_reported_as_a_miss(tmp_path: Path) -> None:
    assert "≤ 1.003: **missed** by 0.097" in "\n".join(report.sections(measured(tmp_path, 2.2)))
    assert "≤ 1.003: met" in "\n".join(report.sections(measured(tmp_path, 2.0)))
    assert "MISSED" in "\n".join(compact(measured(tmp_path, 2.2)))
    assert goals.at_least(0.98, goals.SATURATED) == "≥ 0.99: **missed** by 0.01"


def test_a_rehearsal_is_called_one_in_the_report(tmp_path: Path) -> None:
    results = measured(tmp_path, 2.0)
    assert "rehearsal" in "\n".join(report.sections(results))
    results["options"]["quick"] = False
    assert "rehearsal" not in "\n".join(report.sections(results))


def test_what_failed_is_in_the_report(tmp_path: Path) -> None:
    results = measured(tmp_path, 2.0)
    assert "Failed or left out: tiny/extract: `ValueError: no`" in "\n".join(report.sections(results))
    assert compact(results)[-1].startswith("FAILED tiny/extract")


def test_the_report_replaces_what_is_between_its_markers_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    results = measured(tmp_path, 2.0)
    report.write_page(page, [("run", results)], None)
    first = page.read_text()
    report.write_page(page, [("run", results)], None)
    assert page.read_text() == first
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    assert "old" not in first
    assert "## run" in first


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("mine")
    with pytest.raises(ValueError, match="has no"):
        report.write_page(page, [], None)
    assert page.read_text() == "mine"


def test_memory_is_judged_against_vllms_engine_of_the_same_model() -> None:
    worker = {"reserved_bytes": 0, "cudagraph_mode": "FULL", "runner": "vllm.v1.worker.gpu.model_runner.GPUModelRunner"}
    engines = {
        f"{model}/{name}": {"worker": {**worker, "allocated_bytes": mib * 2**20}}
        for model, name, mib in (("a", "vanilla", 100), ("a", "mia", 150), ("b", "vanilla", 10), ("b", "mia", 90))
    }
    text = "\n".join(report.memory_section({"engines": engines}))
    assert "+50.0 | ≤ 64: met" in text
    assert "+80.0 | ≤ 64: **missed** by 16" in text


def test_readouts_are_judged_by_how_much_later_they_come_than_vllms_first_token() -> None:
    guarded = window("guarded", [0.403, 0.503])
    guarded["answers"]["readout_s"] = [0.401, 0.501]
    served = [window("vanilla", [0.4, 0.5]), guarded]
    text = "\n".join(report.served_sections({"served": served}))
    assert "| 2 | 2.000 | 0 | 1.000 |  | ≤ 2: met |" in text


async def test_readouts_are_judged_by_when_the_server_had_them_where_it_says_so() -> None:
    pages = iter([(1.0, 2.0), (3.0, 5.0), (4.0, 9.0)])

    async def metrics(request: web.Request) -> web.Response:
        within, whole = next(pages)
        lines = ["# TYPE mia_courier_lag_seconds histogram"]
        for stage, n in (("prompt", 1), ("final", 100)):
            lines += [
                f'mia_courier_lag_seconds_bucket{{engine="{engine}",le="{bound}",stage="{stage}"}} {n * value}'
                for engine in (0, 1)
                for bound, value in (("0.002", within), ("+Inf", whole))
            ]
        return web.Response(text="\n".join(lines) + "\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        first, second, third = [await courier.counts(str(server.make_url("")).rstrip("/")) for _ in range(3)]
    verdicts = []
    for lags in (courier.between(first, second), courier.between(first, third)):
        guarded = window("guarded", [0.403, 0.503])
        guarded["answers"]["readout_s"] = [0.401, 0.501]
        guarded["lags"] = lags
        vanilla = {**window("vanilla", [0.4, 0.5]), "lags": {}}
        (verdict,) = (line for line in report.served_sections({"served": [vanilla, guarded]}) if "p50 ≤" in line)
        verdicts.append(verdict)
    assert verdicts[0].endswith("| 1.000 | 66.7% | p50 ≤ 2 ms: met |")
    assert verdicts[1].endswith("| 1.000 | 42.9% | p50 ≤ 2 ms: **missed** |")


def test_the_bound_that_is_judged_is_one_of_the_metric() -> None:
    assert goals.READOUT_MS / 1e3 in LAG_BUCKETS_S


def test_the_plot_shows_the_newest_run_with_the_most_variants(tmp_path: Path) -> None:
    old, new, fewer = measured(tmp_path, 2.0), measured(tmp_path, 2.2), measured(tmp_path, 2.4)
    old["time"], new["time"], fewer["time"] = (f"2026-{day}T10:00:00+00:00" for day in ("11-30", "12-01", "12-01"))
    fewer["rows"] = [row for row in fewer["rows"] if row["variant"] != "idle"]
    assert points({"old": old, "fewer": fewer, "new": new}) == {"tiny": ("new", points({"new": new})["tiny"][1])}


def test_a_command_that_measures_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--limit-s", "0"], ["--limit-s", "nan"], ["--batch", "0"], ["--rate", "-1"], ["--model", "nosuch"]):
        with pytest.raises(SystemExit) as ended:
            arguments(["--model", "tiny", *given])
        assert ended.value.code == 2
        assert given[1] in capsys.readouterr().err.splitlines()[-1]


def test_the_plot_is_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which nothing else here does")
    from bench.plot import draw

    results = measured(tmp_path, 2.2)
    draw({"run": results}, tmp_path / "a.svg")
    draw({"run": results}, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "idle 1" in (tmp_path / "a.svg").read_text()


# A rehearsal


@pytest.mark.parametrize("name", [name for name in ON_CPU if name != "vanilla"])
def test_every_variant_of_an_engine_runs_and_is_what_it_says(name: EngineName, tmp_path: Path) -> None:
    write_weights(TINY, tmp_path / "mia")
    how = starts(TINY, tmp_path, device="cpu")[name]
    with in_process():
        engine = Engine(name, TINY, how.vllm_args, tmp_path)
        try:
            for variant in [variant for variant in VARIANTS.values() if variant.engine == name]:
                batch = Batch(variant.name, [16, 9], [5, 1], seed=1)
                done = engine.run(batch)
                captures = {"hidden": 6, "probed": 6, "attention": 1, "all": 7}.get(variant.name, 0)
                assert done.readouts == 2 * captures
                assert done.seconds > 0
                if variant.steers:
                    assert engine.changed(batch, "idle") == 2
                if variant.name in ("idle", "eager_hooks"):
                    assert any(count > 0 and us > 0 for count, us in engine.profile(batch).values())
                if variant.name == "attention":
                    assert engine.changed(batch, "idle") == 0
        finally:
            engine.close()
