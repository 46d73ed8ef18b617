"""Routing entries against a slow, obvious reference: one token at a time, over any sequence of batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from guard.mia import assembly
from guard.mia.assembly import Asked, Waiting
from guard.mia.buffers import AttentionShape, StepLimits, TapBuffers
from guard.mia.engine_config import EngineConfig
from guard.mia.inbox import Inbox
from guard.mia.ops import LEAST_RELATIVE_NORM, MASS_WORDS, MassEntry
from guard.mia.plan import BatchView, RequestPlan
from guard.mia.probes import ProbeBank
from guard.mia.readouts import Reader
from guard.mia.record import RecordWriter
from guard.mia.results import (
    AttentionReadout,
    HiddenMeanReadout,
    HiddenReadout,
    ProbeReadout,
    QKReadout,
    Readout,
    RowsReadout,
    not_complete,
)
from guard.mia.routing import CACHED, NO_HIDDEN_ROWS, Router
from guard.mia.row_ring import RowRing
from guard.mia.runners.handover import Outbox
from guard.mia.sharding import ALONE
from guard.mia.spec import AttentionCapture, Capture, FirstGenerated, MiaSpec, ProbeCapture, generates
from guard.mia.steering import Bank
from guard.mia.tracking import Tracked

LAYERS = (1, 2, 3)
VECTORS = ("a", "b")
HIDDEN_SIZE = 4
SHAPE = AttentionShape(query_heads=2, key_heads=1, head_size=4, scale=0.5, softcap=0.0, window=None)
CONFIG = EngineConfig(
    hidden_layers=LAYERS,
    attention_heads=tuple((layer, head) for layer in LAYERS for head in range(2)),
    max_hidden_rows_per_step=512,
    max_query_rows_per_step=512,
    probes={"risk": 2},
    steering_layers=LAYERS,
    steering_vectors=VECTORS,
)


PROBE_LAYERS = {"risk": 2}
WEIGHT, BIAS = torch.tensor([[1.0, -1.0, 0.5, 0.0], [0.0, 1.0, 0.0, 1.0]]), torch.tensor([0.1, -0.2])
# Behind another one, so that a probe's outputs are not the first.
PROBES = ProbeBank(
    torch.cat([torch.ones(1, HIDDEN_SIZE), WEIGHT]),
    torch.cat([torch.zeros(1), BIAS]),
    {"other": 1, "risk": 2},
    {"other": slice(0, 1), "risk": slice(1, 3)},
)


def probe_logits(rows: torch.Tensor) -> torch.Tensor:
    return rows @ WEIGHT.T + BIAS


def make_router(
    max_host_bytes: int = 10**9, config: EngineConfig = CONFIG, *, gathers_keys: bool = True
) -> tuple[Router, TapBuffers]:
    vectors = torch.arange(len(VECTORS) * HIDDEN_SIZE, dtype=torch.float32).view(len(VECTORS), HIDDEN_SIZE) + 1
    bank = Bank(None, vectors, {name: i for i, name in enumerate(VECTORS)})
    buffers = TapBuffers.allocate(
        config,
        HIDDEN_SIZE,
        dict.fromkeys(LAYERS, SHAPE),
        StepLimits(8, 64),
        vectors,
        torch.float32,
        ALONE,
        gathers_keys,
    )
    return Router(buffers, bank, PROBES, max_host_bytes), buffers


RANGES = {"tokens": [[0, 1], [0, 1]]}
NAMED = ({"span": "s"}, RANGES)
positions = st.sampled_from(["last_prompt", "prompt", "generated", "all", *NAMED])
query_positions = st.sampled_from(["last_prompt", "generated", {"generated": 2}, {"span": "s"}, RANGES])
gates = st.sampled_from(
    [
        None,
        {"readout": "p0", "above": 0.5},
        {"readout": "a0", "span": "s", "below": 0.4},
        {"readout": "a0", "span": "s", "above": 0.9},
    ]
)
head_lists = st.sets(st.sampled_from(CONFIG.attention_heads), min_size=1, max_size=3).map(sorted)


def build_spec(hidden: list, probes: list, attention: list, qk: list, steer: list) -> MiaSpec:
    captures = {f"p{i}" for i in range(len(probes))} | {f"a{i}" for i in range(len(attention))}
    steered = []
    for v, n, c, p, w, m, k, gate in steer:
        gated = gate is not None and gate["readout"] in captures
        steered.append(
            {"vector": v, "layer": n, "coefficient": c, "phase": "decode" if gated else p, "positions": w, "method": m}
            | {"preserve_norm": k}
            | ({"target": 2.0} if m == "project" else {})
            | ({"gate": gate} if gated else {})
        )
    return MiaSpec.model_validate(
        {
            "spans": {"s": {"tokens": [[0, 1]]}},
            "hidden": {
                f"h{i}": {"layer": layer, "positions": where, "average": mean and (where == "prompt" or where in NAMED)}
                for i, (layer, where, mean) in enumerate(hidden)
            },
            "probes": {f"p{i}": {"probe": "risk", "positions": where} for i, where in enumerate(probes)},
            "attention": {
                f"a{i}": {"heads": heads, "spans": ["s"], "positions": where, "weights": weights}
                for i, (heads, where, weights) in enumerate(attention)
            },
            "qk": {f"q{i}": {"heads": heads, "positions": where} for i, (heads, where) in enumerate(qk)},
            "steer": steered,
        }
    )


specs = st.builds(
    build_spec,
    st.lists(st.tuples(st.sampled_from(LAYERS), positions, st.booleans()), max_size=3),
    st.lists(positions, max_size=2),
    st.lists(st.tuples(head_lists, query_positions, st.booleans()), max_size=2),
    st.lists(st.tuples(head_lists, positions), max_size=2),
    st.lists(
        st.tuples(
            st.sampled_from(VECTORS),
            st.sampled_from(LAYERS),
            st.sampled_from([0.0, 1.0, -2.5]),
            st.sampled_from(["prefill", "decode", "both"]),
            st.sampled_from(["all", "last", {"tokens": [[1, 3], [5, 20]]}]),
            st.sampled_from(["add_vector", "project", "ablate", "replace"]),
            st.booleans(),
            gates,
        ),
        max_size=3,
    ),
)
growing_specs = st.builds(
    build_spec,
    st.lists(
        st.tuples(st.sampled_from(LAYERS), st.sampled_from(["generated", "all"]), st.just(False)),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.sampled_from(["generated", "all"]), max_size=2),
    st.just([]),
    st.just([]),
    st.lists(
        st.tuples(
            st.sampled_from(VECTORS),
            st.sampled_from(LAYERS),
            st.sampled_from([1.0, -2.5]),
            st.sampled_from(["decode", "both"]),
            st.sampled_from(["all", {"tokens": [[1, 3], [5, 20]]}]),
            st.sampled_from(["add_vector", "project", "ablate"]),
            st.booleans(),
            st.none(),
        ),
        max_size=3,
    ),
)
"""What goes on as long as the answer does."""

requests = st.lists(st.tuples(st.none() | specs, st.integers(1, 9)), min_size=1, max_size=5)
AGAIN = -1
"""Instead of a number of tokens: the request was preempted, and is computed again from its first token on."""
some_step = st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, AGAIN]), min_size=5, max_size=5)
# Batches that stay as they are take the short way.
one_each = st.lists(st.sampled_from([1, 1, 1, 0]), min_size=5, max_size=5)
steps_of_five = st.lists(
    st.tuples(some_step, st.just(1)) | st.tuples(one_each, st.integers(1, 5)), min_size=1, max_size=6
).map(lambda runs: [step for step, times in runs for _ in range(times)])


class World:
    """A model that is a table: every request's token has its own stream, queries and keys, by layer."""

    def stream(self, request: int, position: int, layer: int) -> torch.Tensor:
        return self._draw(request, position, layer, 0, HIDDEN_SIZE)

    def query(self, request: int, position: int, layer: int) -> torch.Tensor:
        return self._draw(request, position, layer, 1, SHAPE.query_heads * SHAPE.head_size)

    def key(self, request: int, position: int, layer: int) -> torch.Tensor:
        return self._draw(request, position, layer, 2, SHAPE.key_heads * SHAPE.head_size)

    def _draw(self, request: int, position: int, layer: int, kind: int, width: int) -> torch.Tensor:
        seed = ((request * 97 + position) * 31 + layer) * 7 + kind
        return torch.randn(width, generator=torch.Generator().manual_seed(seed))


WORLD = World()


@dataclass(frozen=True)
class WorldsCache:
    """Keys where an engine on a GPU finds them, and the masses as ``kernels.span_mass`` computes them, entry by entry.

    Rows of the block table are requests' numbers.
    """

    queries: torch.Tensor

    def keys(self, tracked: Tracked, one: RequestPlan, layer: int, start: int, end: int) -> torch.Tensor:
        keys = torch.stack([WORLD.key(one.block_row, t, layer) for t in range(start, end)])
        return keys.view(-1, SHAPE.key_heads, SHAPE.head_size)

    def masses(self, entries: int, tables: torch.Tensor, values: torch.Tensor) -> bool:
        words = tables.tolist()
        for n in range(entries):
            begin = words[0] + n * MASS_WORDS
            entry = MassEntry(*words[begin : begin + MASS_WORDS])
            assert entry.span_count == 1
            ranges = np.asarray(words[entry.spans + 1 : entry.spans + 1 + 2 * words[entry.spans]]).reshape(-1, 2)
            keys = [WORLD.key(entry.request, t, LAYERS[entry.layer]) for t in range(entry.position + 1)]
            logits = torch.stack(keys) @ self.queries[entry.query] * SHAPE.scale
            shares = torch.softmax(logits, dim=0)
            values[entry.out] = sum(shares[start:end].sum() for start, end in ranges.tolist())
        return True


@dataclass
class Slow:
    """One request, walked token by token: what it must give, computed in the most obvious way."""

    index: int
    spec: MiaSpec
    prompt_len: int
    seen: int = 0
    opened: dict[int, int] = field(default_factory=dict)
    steered_tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    dose: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def steered(self, position: int, layer: int, bank: torch.Tensor) -> torch.Tensor:
        """One token's stream after everything that acts there, one thing after the other."""
        stream, in_prompt = WORLD.stream(self.index, position, layer), position < self.prompt_len
        start = stream
        for i, steer in enumerate(self.spec.steer):
            in_ranges, is_last = position in {1, 2, *range(5, 20)}, position >= self.prompt_len - 1
            here = {"all": True, "last": is_last}[steer.positions] if isinstance(steer.positions, str) else in_ranges
            open_ = steer.gate is None or position >= self.opened.get(i, 10**9)
            acts = steer.layer == layer and steer.phase in ("both", "prefill" if in_prompt else "decode")
            if not (acts and here and open_) or steer.coefficient == 0.0:
                continue
            vector = bank[VECTORS.index(steer.vector)]
            unit = vector / vector.norm()
            after = {
                "add_vector": stream + steer.coefficient * vector,
                "project": stream + steer.coefficient * ((steer.target or 0.0) - stream @ unit) * unit,
                "ablate": stream - steer.coefficient * (stream @ unit) * unit,
                "replace": steer.coefficient * vector,
            }[steer.method]
            keeps = steer.preserve_norm and after.norm() > LEAST_RELATIVE_NORM * stream.norm()
            after = after * stream.norm() / after.norm() if keeps else after
            if position >= self.seen:
                self.steered_tokens[i] += 1
                self.dose[i] = max(self.dose[i], float((after - start).norm() / start.norm()))
            stream = after
        return stream

    def attention(self, position: int, layer: int, head: int) -> list[float]:
        query = WORLD.query(self.index, position, layer).view(SHAPE.query_heads, -1)[head]
        keys = [WORLD.key(self.index, t, layer).view(SHAPE.key_heads, -1)[0] for t in range(position + 1)]
        exps = [math.exp(SHAPE.scale * float(query @ key)) for key in keys]
        return [x / sum(exps) for x in exps]

    def wanted(self, capture: Capture, until: int) -> list[int]:
        """Every token below ``until`` that a capture reads."""
        rules = {
            "last_prompt": lambda p: p == self.prompt_len - 1,
            "prompt": lambda p: p < self.prompt_len,
            "generated": lambda p: p >= self.prompt_len,
            "all": lambda p: True,
        }
        rule = rules[capture.positions] if isinstance(capture.positions, str) else lambda p: p == 0
        if isinstance(capture.positions, FirstGenerated):
            first = capture.positions.generated
            return [p for p in range(until) if self.prompt_len <= p < self.prompt_len + first]
        return [p for p in range(until) if rule(p)]

    def end_step(self, computed: int, bank: torch.Tensor) -> None:
        """Gates look at the rows that this step read for the first time; a mean is there when the prompt is."""
        for i, steer in enumerate(self.spec.steer):
            gate = steer.gate
            if gate is None or i in self.opened:
                continue
            capture = self.spec.captures[gate.readout]
            new = [p for p in self.wanted(capture, computed) if p >= self.seen]
            if isinstance(capture, ProbeCapture):
                values = [float(probe_logits(self.stream_at(p, PROBE_LAYERS["risk"], bank))[0]) for p in new]
            elif generates(capture):
                values = [self.mass(capture, p) for p in new]
            else:
                ended = self.seen < self.prompt_len <= computed
                read = self.wanted(capture, self.prompt_len)
                values = [sum(self.mass(capture, p) for p in read) / len(read)] if ended else []
            if any(gate.opens(value) for value in values):
                self.opened[i] = max(computed, self.prompt_len)
        self.seen = max(self.seen, computed)

    def stream_at(self, position: int, layer: int, bank: torch.Tensor) -> torch.Tensor:
        again = Slow(self.index, self.spec, self.prompt_len, opened=dict(self.opened))
        return again.steered(position, layer, bank)

    def mass(self, capture: AttentionCapture, position: int) -> float:
        """On the span, which is the first token, as the mean over heads."""
        return sum(self.attention(position, n, h)[0] for n, h in capture.heads) / len(capture.heads)


def view(batch: list[tuple[int, int]], computed: list[int], prompt_lens: list[int]) -> BatchView:
    starts = np.cumsum([0, *(n for _, n in batch)], dtype=np.int32)
    before = [computed[i] for i, _ in batch]
    samples = [computed[i] + n >= prompt_lens[i] for i, n in batch]
    rows = np.asarray([i for i, _ in batch], np.int32)
    return BatchView([f"r{i}" for i, _ in batch], starts, np.asarray(before, np.int32), np.asarray(samples), rows)


def run_step(buffers: TapBuffers, batch: list[tuple[int, int]], computed: list[int], slow: dict[int, Slow]) -> None:
    """The ops, as the model would call them, and every steered row against the slow walk."""
    tokens = [(i, computed[i] + j) for i, length in batch for j in range(length)]
    bank, control = buffers.bank, buffers.control.tensor
    for layer in LAYERS:
        hidden = torch.stack([WORLD.stream(i, p, layer) for i, p in tokens])
        residual = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        hidden -= residual
        torch.ops.mia.steer_rows(
            hidden, residual, control, buffers.steer[layer], bank, buffers.dose_limit, buffers.opened_at, buffers.doses
        )
        expected = [slow[i].steered(p, layer, bank) if i in slow else WORLD.stream(i, p, layer) for i, p in tokens]
        torch.testing.assert_close(hidden + residual, torch.stack(expected), rtol=1e-4, atol=1e-4)
        queries = torch.stack([WORLD.query(i, p, layer) for i, p in tokens])
        keys = torch.stack([WORLD.key(i, p, layer) for i, p in tokens])
        taps = [(hidden, residual, buffers.hidden[layer]), (queries, None, buffers.query[layer])]
        taps += [(keys, None, buffers.key[layer])] if buffers.key else []
        for source, addend, tap in taps:
            torch.ops.mia.gather_rows(source, addend, control, tap.number, tap.out)


REPLACED_THEN_ABLATED = MiaSpec.model_validate(
    {
        "steer": [
            {"vector": "a", "layer": 3, "coefficient": 1.0, "phase": "prefill", "method": "replace"},
            {
                "vector": "a",
                "layer": 3,
                "coefficient": 1.0,
                "phase": "prefill",
                "method": "ablate",
                "preserve_norm": True,
            },
        ]
    }
)
"""Nothing is left of the stream after it: what rounding leaves must not be blown up to the old norm."""

TWO_GATES = MiaSpec.model_validate(
    {
        "spans": {"s": {"tokens": [[0, 1]]}},
        "attention": {"a0": {"heads": [[1, 0]], "spans": ["s"]}},
        "steer": [
            {
                "vector": vector,
                "layer": 1,
                "coefficient": 1.0,
                "phase": "decode",
                "gate": {"readout": "a0", "span": "s", "above": 0.0},
            }
            for vector in VECTORS
        ],
    }
)
"""Both look at the same mean, each with a sum of its own."""


GENERATED_ROWS = MiaSpec.model_validate({"hidden": {"h0": {"layer": 1, "positions": "generated"}}})
"""The last token that is computed again has no entry, and the next one, in a batch that looks alike, needs one."""


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@example([(REPLACED_THEN_ABLATED, 1)], [[2, 0, 0, 0, 0]], True)
@example([(TWO_GATES, 3)], [[2, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]], False)
@example([(GENERATED_ROWS, 1)], [[3] * 5, [AGAIN] * 5, [2] * 5, [1] * 5, [1] * 5], True)
@given(requests, steps_of_five, st.booleans())
def test_readouts_and_steering_are_what_a_walk_over_single_tokens_gives(
    monkeypatch: pytest.MonkeyPatch,
    asked: list[tuple[MiaSpec | None, int]],
    steps: list[list[int]],
    gathers_keys: bool,
) -> None:
    monkeypatch.setattr(assembly, "SETTLE_STEPS", 3)
    compare_with_the_walk(asked, steps, gathers_keys)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(growing_specs, st.just(2)), min_size=2, max_size=5),
    st.lists(st.lists(st.sampled_from([1] * 9 + [0, 0, 2, AGAIN]), min_size=5, max_size=5), min_size=2, max_size=9),
    st.integers(1, 9),
)
def test_answers_in_batches_that_always_change_are_what_the_walk_gives(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[MiaSpec, int]], steps: list[list[int]], settle_steps: int
) -> None:
    """As in a busy engine: requests that go on as before beside some that come, stop for a while and are preempted."""
    monkeypatch.setattr(assembly, "SETTLE_STEPS", settle_steps)
    compare_with_the_walk(asked, [[2] * 5, *steps], gathers_keys=False)


def compare_with_the_walk(
    asked: Sequence[tuple[MiaSpec | None, int]], steps: list[list[int]], gathers_keys: bool
) -> None:
    """Every step of a batch, its readouts and its steering. steps: of each request's tokens in it."""
    router, buffers = make_router(gathers_keys=gathers_keys)
    ring = RowRing(2**16, HIDDEN_SIZE, torch.float32, pinned=False)
    keys = None if gathers_keys else WorldsCache(buffers.query_pool)
    reader, writer = Reader(router, buffers, PROBES, ring, keys=keys), RecordWriter(ring.address)
    inbox = Inbox()
    # What an earlier request has left there.
    buffers.sums.fill_(math.nan)
    buffers.opened_at.fill_(0)
    bank = buffers.bank
    prompt_lens = [prompt_len for _, prompt_len in asked]
    computed = [0] * len(asked)
    slow = {i: Slow(i, spec, length) for i, (spec, length) in enumerate(asked) if spec is not None and spec.asks}
    got: dict[int, dict[str, Readout]] = defaultdict(dict)
    reports: dict[int, Any] = {}
    for i, one in slow.items():
        router.add(f"r{i}", one.spec, one.prompt_len)
        inbox.add(f"r{i}", Waiting(Asked(one.spec, one.prompt_len, one.prompt_len + 3, HIDDEN_SIZE), None))

    for step in steps:
        computed = [0 if step[i] == AGAIN else n for i, n in enumerate(computed)]
        batch = [(i, n) for i, n in enumerate(step[: len(asked)]) if n > 0]
        if not batch:
            continue
        batch_view = view(batch, computed, prompt_lens)
        plan = router.fill(batch_view)
        run_step(buffers, batch, computed, slow)
        if plan is not None:
            message = writer.message(reader.read(plan))
            inbox.receive([(message.layout, message.body)])
        for i, length in batch:
            computed[i] += length
            if i in slow:
                slow[i].end_step(computed[i], bank)
            if i in slow and (items := inbox.prompt(f"r{i}")) is not None:
                assert computed[i] >= prompt_lens[i]
                assert got[i] == {}
                got[i] = items
    for i, one in slow.items():
        if one.seen >= one.prompt_len:
            items, reports[i] = inbox.end(f"r{i}")
            got[i] |= items
        else:
            inbox.forget([f"r{i}"])
    assert inbox.waiting == {}

    for i, one in slow.items():
        assert router.requests[f"r{i}"].failed == {}
        for name, capture in one.spec.captures.items():
            check_readout(one, capture, got[i].get(name), bank)
        if one.spec.steer and one.seen >= one.prompt_len:
            for j, report in enumerate(reports[i]):
                assert report.steered_tokens == one.steered_tokens[j]
                assert report.relative_dose == pytest.approx(one.dose[j], rel=1e-3, abs=1e-5)
                assert report.opened_at == one.opened.get(j)
        router.remove(f"r{i}")
    assert router._host_bytes == 0
    assert sorted(router._free_gates) == list(range(len(buffers.opened_at)))


def check_readout(one: Slow, capture: Capture, item: Readout | None, bank: torch.Tensor) -> None:
    """What came of one capture is the slow walk's; nothing twice, nothing missing that was due."""
    if one.seen < one.prompt_len:
        assert item is None
        return
    read = one.wanted(capture, one.seen if generates(capture) else one.prompt_len)
    assert item is not None
    assert item.status == "complete"
    if not read and isinstance(item, RowsReadout):
        assert (item.positions, item.values is not None and item.values.shape) == ((), (0, HIDDEN_SIZE))
        return
    if not read and not isinstance(item, QKReadout):
        assert item == not_complete(capture, "complete", "")
        return
    if isinstance(item, HiddenReadout):
        np.testing.assert_allclose(item.values, one.stream_at(read[0], item.layer, bank), rtol=1e-4, atol=1e-4)
        assert item.position == read[0]
        return
    if isinstance(item, HiddenMeanReadout):
        rows = torch.stack([one.stream_at(p, item.layer, bank) for p in read])
        np.testing.assert_allclose(item.values, rows.mean(dim=0), rtol=1e-4, atol=1e-4)
        assert [p for start, end in item.tokens for p in range(start, end)] == read
        return
    assert list(item.positions) == read
    if isinstance(item, RowsReadout):
        rows = torch.stack([one.stream_at(p, item.layer, bank) for p in read])
        np.testing.assert_allclose(item.values, rows, rtol=1e-4, atol=1e-4)
    elif isinstance(item, ProbeReadout):
        rows = torch.stack([one.stream_at(p, PROBE_LAYERS["risk"], bank) for p in read])
        np.testing.assert_allclose(item.logits, probe_logits(rows), rtol=1e-3, atol=1e-3)
    elif isinstance(item, QKReadout):
        for layer, queries in item.queries.items():
            heads = [h for n, h in item.heads if n == layer]
            rows = [WORLD.query(one.index, p, layer).view(SHAPE.query_heads, -1)[heads].numpy() for p in read]
            np.testing.assert_array_equal(queries, np.asarray(rows, np.float32).reshape(queries.shape))
            keys = torch.stack([WORLD.key(one.index, t, layer) for t in range(len(item.keys[layer]))])
            np.testing.assert_array_equal(item.keys[layer], keys.view(-1, SHAPE.key_heads, SHAPE.head_size))
            assert len(item.keys[layer]) >= (read[-1] + 1 if generates(capture) and read else one.prompt_len)
    else:
        weights = np.zeros((len(read), len(item.heads), max(read[-1] + 1, one.prompt_len)))
        for r, position in enumerate(read):
            for column, (layer, head) in enumerate(item.heads):
                weights[r, column, : position + 1] = one.attention(position, layer, head)
        if isinstance(item, AttentionReadout):
            weights = weights.mean(axis=0)
        np.testing.assert_allclose(item.mass["s"], weights[..., 0], atol=1e-5)
        if capture.weights:
            np.testing.assert_allclose(item.weights, weights[..., : item.weights.shape[-1]], atol=1e-5)
            assert item.weights.shape[-1] >= read[-1] + 1


def test_a_front_end_is_told_all_that_concerns_its_own_requests_and_needs_no_more() -> None:
    """Layouts without any of them do not come, and yet others build on those."""
    router, buffers = make_router()
    ring = RowRing(2**16, HIDDEN_SIZE, torch.float32, pinned=False)
    reader, writer = Reader(router, buffers, PROBES, ring), RecordWriter(ring.address)
    inboxes, outbox = [Inbox(), Inbox()], Outbox()
    alive = {f"r{i}": SimpleNamespace(client_index=i) for i in range(2)}
    for i, inbox in enumerate(inboxes):
        router.add(f"r{i}", GENERATED_ROWS, 1)
        inbox.add(f"r{i}", Waiting(Asked(GENERATED_ROWS, 1, 20, HIDDEN_SIZE), None))
    computed = [0, 0, 0]
    # The third asks for nothing, and makes the batch another one.
    for who in ([0], [0], [1], [1], [1, 2], [1], [1, 0], [0], [0, 2], [0, 1], [1, 2], [1], [2, 0, 1], [0, 1], [1], [0]):
        batch = [(i, 1) for i in who]
        plan = router.fill(view(batch, computed, [1, 1, 1]))
        run_step(buffers, batch, computed, {})
        if plan is not None:
            outbox.put(writer.message(reader.read(plan)), alive)
        for i in who:
            computed[i] += 1
        for i in {*who} - {2}:
            outputs = [SimpleNamespace(request_id=f"r{i}", kv_transfer_params=None)]
            outbox.load(i, outputs)
            inboxes[i].receive((outputs[0].kv_transfer_params or {}).get("mia", ()))
    for i, inbox in enumerate(inboxes):
        items, _ = inbox.end(f"r{i}")
        check_readout(Slow(i, GENERATED_ROWS, 1, computed[i]), GENERATED_ROWS.captures["h0"], items["h0"], buffers.bank)


def test_a_batch_that_only_decodes_is_routed_once_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    router, buffers = make_router()
    sent: list[int] = []
    monkeypatch.setattr(type(buffers.control), "upload", lambda control: sent.append(1))
    spec = MiaSpec.model_validate(
        {
            "hidden": {"h": {"layer": 1, "positions": "all"}},
            "probes": {"p": {"probe": "risk", "positions": "generated"}},
            "steer": [
                {"vector": "a", "layer": 2, "coefficient": 1.0, "positions": {"tokens": [[0, 9]]}},
                {
                    "vector": "b",
                    "layer": 2,
                    "coefficient": 1.0,
                    "phase": "decode",
                    "gate": {"readout": "p", "above": 1},
                },
            ],
        }
    )
    for name in ("r0", "r1"):
        router.add(name, spec, 3)
    uploads = []
    batches = [([(0, 3)], [0, 0]), ([(0, 1), (1, 3)], [3, 0])]
    batches += [([(0, 1), (1, 1)], [4 + n, 3 + n]) for n in range(8)]
    for batch, computed in batches:
        before = len(sent)
        plan = router.fill(view(batch, computed, [3, 3]))
        uploads.append(len(sent) - before)
    # Both prompts, the first step of both, and where the ranges of each end.
    assert uploads == [1, 1, 1, 0, 0, 0, 0, 1, 1, 0]
    assert plan.offset == 1
    router.remove("r1")
    assert router.fill(view([(0, 1)], [12], [3])).offset == 0


def test_tokens_computed_again_after_preemption_are_not_gathered_twice() -> None:
    router, _ = make_router()
    spec = MiaSpec.model_validate({"hidden": {"h": {"layer": 1, "positions": "all"}}})
    router.add("r0", spec, 4)
    positions = []
    for computed, length in ((0, 3), (0, 4), (4, 1), (0, 5), (5, 1)):
        plan = router.fill(view([(0, length)], [computed], [4]))
        chunks = plan.layout.requests["r0"].rows
        positions += [chunk.start + plan.offset + j for chunk in chunks for j in range(chunk.length)]
    assert positions == list(range(6))


def test_rows_that_the_prefix_cache_skipped_or_that_find_no_space_fail_their_capture_alone() -> None:
    router, _ = make_router()
    captures = {"all": {"layer": 1, "positions": "all"}, "last": {"layer": 1}}
    router.add("r0", MiaSpec.model_validate({"hidden": captures}), 6)
    plan = router.fill(view([(0, 2)], [4], [6]))
    assert router.requests["r0"].failed == {"all": CACHED}
    assert [chunk.capture for chunk in plan.layout.requests["r0"].rows] == ["last"]

    config = CONFIG.model_copy(update={"max_hidden_rows_per_step": 3, "hidden_layers": (1,), "probes": {}})
    router, _ = make_router(config=config)
    router.add("r0", MiaSpec.model_validate({"hidden": {"h": captures["all"]}}), 3)
    router.add("r1", MiaSpec.model_validate({"hidden": {"h": captures["all"]}}), 3)
    plan = router.fill(view([(0, 3), (1, 3)], [0, 0], [3, 3]))
    assert router.requests["r0"].failed == {}
    assert router.requests["r1"].failed == {"h": NO_HIDDEN_ROWS}
    assert {id_: len(one.rows) for id_, one in plan.layout.requests.items()} == {"r0": 1, "r1": 0}


def test_a_step_in_which_nobody_asks_clears_the_entries_of_the_step_before() -> None:
    router, buffers = make_router()
    router.add("r0", MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}}), 2)
    assert router.fill(view([(0, 2), (1, 3)], [0, 0], [2, 3])) is not None
    header = buffers.control.tensor[2 * buffers.hidden[1].number :]
    assert int(header[1]) == 1
    assert router.fill(view([(1, 1)], [2, 3], [2, 3])) is None
    assert int(header[1]) == 0


def test_a_request_costs_nothing_once_its_tokens_are_read_and_is_steered_again_after_a_preemption() -> None:
    router, buffers = make_router()
    steer = {"layer": 1, "vector": "a", "coefficient": 1.0, "phase": "prefill"}
    router.add("r0", MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}, "steer": [steer]}), 4)
    entries = buffers.control.tensor[2 * buffers.steer[1] :]

    first = router.fill(view([(0, 4)], [0], [4]))
    assert first is not None
    assert int(entries[1]) == 4
    for computed in (4, 5):
        assert router.fill(view([(0, 1)], [computed], [4])) is None
        assert int(entries[1]) == 0
    # Its cache is gone, so what stood in it has to come out as before; what was read is not read twice.
    again = router.fill(view([(0, 6)], [0], [6]))
    assert again is not None
    assert int(entries[1]) == 4
    assert again.layout.requests["r0"].rows == []


def test_keys_that_find_no_space_are_not_reserved_and_space_comes_back_when_a_request_ends() -> None:
    one_prompt_bytes = 4 * 4 * SHAPE.key_heads * SHAPE.head_size
    router, _ = make_router(max_host_bytes=one_prompt_bytes)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    router.add("first", spec, 4)
    router.add("second", spec, 1)
    assert router.requests["first"].keys is not None
    assert router.requests["second"].keys is None
    router.remove("first")
    router.add("third", spec, 4)
    assert router.requests["third"].keys is not None


@pytest.mark.parametrize("count", [1, 3])
def test_adding_a_request_again_keeps_one_reservation(count: int) -> None:
    router, _ = make_router(max_host_bytes=4 * 4 * SHAPE.key_heads * SHAPE.head_size)
    spec = MiaSpec.model_validate(
        {"spans": {"s": {"tokens": [[0, 1]]}}, "attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}}
    )
    for _ in range(count):
        router.add("r", spec, 4)
        assert router.requests["r"].keys is not None
