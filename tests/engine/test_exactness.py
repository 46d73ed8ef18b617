"""The aperture inside a real engine, eager and compiled, against transformers in float32 on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import Answer, MiaLLM
from guard.mia.results import AttentionReadout, HiddenMeanReadout, HiddenReadout, RowsReadout
from guard.mia.spec import MAX_SPEC_BYTES, AttentionCapture, HiddenCapture, MiaSpec, SpecError, Steer, TokenRanges
from tests.engine import engines, oracle

LAYERS, HEADS = (1, 2, 3), tuple((layer, head) for layer in (1, 2, 3) for head in range(4))
COEFFICIENT = 3.0
READ_ALL = MiaSpec.model_validate(
    {
        "spans": {"instruction": "system", "data": "user.last"},
        "hidden": {f"h{layer}": {"layer": layer} for layer in LAYERS},
        "attention": {"a": {"heads": HEADS, "spans": ["instruction", "data"]}},
    }
)
CONVERSATIONS = [
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello there " * n}] for n in (1, 4, 17, 30)
]


@dataclass
class Engine:
    llm: MiaLLM
    folder: Path
    vector: np.ndarray

    @property
    def push(self) -> oracle.Push:
        """What ``with_steering()`` does."""
        return oracle.Push(2, COEFFICIENT, self.vector)

    def chat(self, spec: MiaSpec | list[MiaSpec], conversations: Any = CONVERSATIONS, **sampling: Any) -> list[Answer]:
        return self.llm.chat(conversations, spec, **{"max_tokens": 8, "ignore_eos": True, **sampling})


@pytest.fixture(scope="module", params=["eager", "compiled"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    vectors = tmp_path_factory.mktemp("vectors")
    vector = torch.randn(128, generator=torch.Generator().manual_seed(1))
    save_file({"vector": vector}, vectors / "push.safetensors")
    config = EngineConfig(
        hidden_layers=LAYERS,
        attention_heads=HEADS,
        max_hidden_rows_per_step=512,
        steering_layers=(1, 2),
        steering_folder=vectors,
        steering_vectors=("push",),
    )
    with engines.engine(folder, config, compiled=request.param == "compiled") as llm:
        yield Engine(llm, folder, vector.numpy())


def with_steering(layer: int = 2, coefficient: float = COEFFICIENT, phase: str = "both") -> MiaSpec:
    steer = Steer(vector="push", layer=layer, coefficient=coefficient, phase=phase)
    return READ_ALL.model_copy(update={"steer": (steer,)})


def assert_exact(engine: Engine, answer: Answer, *pushes: oracle.Push) -> None:
    readouts = answer.readouts[0]
    (truth,) = oracle.read(engine.folder, [answer.prompt_token_ids], *pushes)
    for layer in LAYERS:
        got, expected = readouts.items[f"h{layer}"], truth.hidden[layer - 1][-1]
        assert isinstance(got, HiddenReadout)
        assert (got.status, got.position) == ("complete", len(answer.prompt_token_ids) - 1)
        assert got.token_id == answer.prompt_token_ids[-1]
        assert np.linalg.norm(got.values - expected) <= 1e-4 * np.linalg.norm(expected)
    got = readouts.items["a"]
    assert isinstance(got, AttentionReadout)
    assert got.status == "complete"
    for span in ("instruction", "data"):
        tokens = [t for start, end in readouts.span_tokens[span] for t in range(start, end)]
        expected = [truth.attention[layer - 1][head, -1, tokens].sum() for layer, head in HEADS]
        np.testing.assert_allclose(got.mass[span], expected, atol=1e-4)


def test_readouts_of_a_mixed_chunked_batch_are_the_models_own(engine: Engine) -> None:
    for answer in engine.chat(READ_ALL):
        assert_exact(engine, answer)


def test_spans_are_the_messages_tokens(engine: Engine) -> None:
    (answer, *_) = engine.chat(READ_ALL)
    # One token a byte: "<|start|>system\n" is 8 tokens, then the 8 bytes of "Be kind.".
    assert answer.readouts[0].span_tokens["instruction"] == ((8, 16),)
    assert answer.readouts[0].span_tokens["data"] == ((24, 24 + len("hello there")),)


def test_parts_of_a_content_are_spans_though_the_template_takes_no_lists(engine: Engine) -> None:
    parts = [{"type": "text", "text": text} for text in ("Summarise:", " a document", "another one ")]
    spec = MiaSpec.model_validate(
        {
            "spans": {"all": "user", "second": "user.last.part.1", "third": "message.-1.part.-1"},
            "attention": {"a": {"heads": HEADS, "spans": ["all", "second", "third"]}},
        }
    )
    (answer,) = engine.chat(spec, [[{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]])
    tokens = answer.readouts[0].span_tokens
    ((begin, _),) = tokens["all"]
    # One token a byte; the template trims the message's end.
    assert tokens["second"] == ((begin + 11, begin + 22),)
    assert tokens["third"] == ((begin + 23, begin + 34),)
    assert answer.items["a"].status == "complete"


def test_rows_at_any_positions_are_the_models_own(engine: Engine) -> None:
    captures = {
        "all": {"layer": 2, "positions": "all"},
        "prompt": {"layer": 3, "positions": "prompt"},
        "generated": {"layer": 1, "positions": "generated"},
        "span": {"layer": 2, "positions": {"span": "data"}},
        "ranges": {"layer": 2, "positions": {"tokens": [[5, 9], [0, 2], [7, 12]]}},
        "mean": {"layer": 2, "positions": {"tokens": [[5, 9], [0, 2], [7, 12]]}, "average": True},
        "last": {"layer": 2},
    }
    spec = MiaSpec.model_validate({"spans": {"data": "user.last"}, "hidden": captures})
    for answer in engine.chat(spec):
        assert [readouts.stage for readouts in answer.readouts] == ["prompt", "final"]
        # The last generated token is never fed to the model.
        ids = answer.prompt_token_ids + answer.token_ids[:-1]
        (truth,) = oracle.read(engine.folder, [ids])
        length = len(answer.prompt_token_ids)
        ((begin, end),) = answer.readouts[0].span_tokens["data"]
        expected = {
            "all": range(len(ids)),
            "prompt": range(length),
            "generated": range(length, len(ids)),
            "span": range(begin, end),
            "ranges": [0, 1, *range(5, 12)],
        }
        for name, positions in expected.items():
            got = answer.items[name]
            assert isinstance(got, RowsReadout)
            assert (got.status, got.positions) == ("complete", tuple(positions))
            assert got.token_ids == tuple(ids[p] for p in positions)
            rows = truth.hidden[got.layer - 1][list(positions)]
            assert np.linalg.norm(got.values - rows) <= 1e-4 * np.linalg.norm(rows)
        mean, ranges = answer.items["mean"], answer.items["ranges"].values
        assert isinstance(mean, HiddenMeanReadout)
        assert mean.tokens == ((0, 2), (5, 12))
        np.testing.assert_allclose(mean.values, ranges.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-6)
        last = answer.items["last"]
        assert isinstance(last, HiddenReadout)
        np.testing.assert_array_equal(last.values, answer.items["all"].values[length - 1])


def test_a_steered_request_is_steered_exactly_and_its_neighbours_are_not(engine: Engine) -> None:
    plain = engine.chat(READ_ALL)
    mixed = engine.chat([with_steering() if i % 2 == 0 else READ_ALL for i in range(len(CONVERSATIONS))])
    for i, answer in enumerate(mixed):
        assert_exact(engine, answer, *([engine.push] if i % 2 == 0 else []))
        assert (answer.token_ids == plain[i].token_ids) == (i % 2 == 1)


def test_a_prompt_seen_before_reads_the_same_and_a_steered_one_leaves_nothing_behind(engine: Engine) -> None:
    cold = engine.chat(READ_ALL)
    engine.chat(with_steering(layer=1))
    hidden_alone = READ_ALL.model_copy(update={"attention": {}})
    for answer, first in zip(engine.chat(hidden_alone), cold, strict=True):
        assert answer.token_ids == first.token_ids
        for layer in LAYERS:
            got = answer.readouts[0].items[f"h{layer}"]
            np.testing.assert_allclose(got.values, first.readouts[0].items[f"h{layer}"].values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("preserve_norm", [False, True])
@pytest.mark.parametrize(
    ("method", "coefficient", "target"),
    [
        ("add_vector", 3.0, None),
        ("project", 1.0, 4.0),
        ("project", 0.5, -2.0),
        ("ablate", 1.0, None),
        ("replace", 0.7, None),
    ],
)
def test_every_method_does_what_its_formula_says(
    engine: Engine, method: str, coefficient: float, target: float | None, preserve_norm: bool
) -> None:
    steer = Steer(
        vector="push", layer=2, coefficient=coefficient, method=method, target=target, preserve_norm=preserve_norm
    )
    push = oracle.Push(2, coefficient, engine.vector, method, target or 0.0, preserve_norm)
    for answer in engine.chat(READ_ALL.model_copy(update={"steer": (steer,)}), CONVERSATIONS[:2], max_tokens=1):
        assert_exact(engine, answer, push)


def test_several_vectors_act_in_order_at_their_own_positions(engine: Engine) -> None:
    ranges = TokenRanges(tokens=((2, 5), (9, 30)))
    first = Steer(vector="push", layer=1, coefficient=2.0, positions=ranges)
    second = Steer(vector="push", layer=1, coefficient=1.0, method="ablate")
    third = Steer(vector="push", layer=2, coefficient=-1.5, positions="last")
    spec = READ_ALL.model_copy(update={"steer": (first, second, third)})
    for answer in engine.chat(spec, max_tokens=1):
        last = len(answer.prompt_token_ids) - 1
        assert_exact(
            engine,
            answer,
            oracle.Push(1, 2.0, engine.vector, positions=(*range(2, 5), *range(9, 30))),
            oracle.Push(1, 1.0, engine.vector, "ablate"),
            oracle.Push(2, -1.5, engine.vector, positions=(last,)),
        )


def test_each_phase_steers_its_own_tokens(engine: Engine) -> None:
    plain, both = engine.chat(READ_ALL), engine.chat(with_steering())
    decode = engine.chat(with_steering(phase="decode"))
    prefill = engine.chat(with_steering(phase="prefill"))
    for i in range(len(CONVERSATIONS)):
        assert_exact(engine, decode[i])
        assert_exact(engine, prefill[i], engine.push)
        # The first token comes from the prompt alone: decode steering cannot change it, prefill steering decides it.
        assert decode[i].token_ids[0] == plain[i].token_ids[0]
        assert prefill[i].token_ids[0] == both[i].token_ids[0]
        assert decode[i].token_ids != plain[i].token_ids


def test_steering_by_zero_changes_no_token_and_no_logprob(engine: Engine) -> None:
    nothing = MiaSpec()
    zero = with_steering(coefficient=0.0).model_copy(update={"hidden": {}, "attention": {}})
    runs = []
    for spec in (zero, nothing):
        # A prompt half read from the prefix cache is batched otherwise, which alone moves the last bit.
        engine.llm.llm.reset_prefix_cache()
        runs.append(engine.chat(spec, logprobs=1))
    a, b = runs
    assert all(x.cumulative_logprob is not None for x in a)
    assert [(x.token_ids, x.cumulative_logprob) for x in a] == [(x.token_ids, x.cumulative_logprob) for x in b]


def test_a_span_that_matches_no_message_is_unavailable_and_says_so(engine: Engine) -> None:
    no_system = [[{"role": "user", "content": "hello"}]]
    for spec in (READ_ALL, READ_ALL.model_copy(update={"hidden": {}})):
        (answer,) = engine.chat(spec, no_system)
        got = answer.readouts[0].items["a"]
        assert got.status == "unavailable"
        assert "instruction" in got.reason


def test_a_spec_that_grows_beyond_what_a_client_may_send_reaches_the_engine_all_the_same(engine: Engine) -> None:
    """As spans of many messages do, which are short to write and long once they are token ranges."""
    ranges = TokenRanges(tokens=tuple((i, i + 1) for i in range(0, 400, 2)))
    spec = MiaSpec(
        spans={f"s{i}": ranges for i in range(16)},
        attention={"a": AttentionCapture(heads=HEADS[:1], spans=("s0",))},
        hidden={f"{'h' * 60}{i}": HiddenCapture(layer=i % 3 + 1, positions=ranges) for i in range(30)},
    )
    assert len(spec.to_wire()) > MAX_SPEC_BYTES
    (answer,) = engine.chat(spec, [[{"role": "user", "content": "hello there " * 35}]], max_tokens=1)
    assert {item.status for item in answer.items.values()} == {"complete"}


def test_a_spec_that_came_past_the_front_door_never_reaches_the_engine(engine: Engine) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    params = SamplingParams(max_tokens=1, extra_args={"mia": READ_ALL.to_wire()})
    with pytest.raises(VLLMValidationError, match="unchecked"):
        engine.llm.llm.generate("hello", params, use_tqdm=False)
    assert engine.chat(READ_ALL)[0].readouts


def test_what_has_no_tap_is_refused_before_the_engine(engine: Engine) -> None:
    with pytest.raises(SpecError, match="layer 3"):
        engine.chat(with_steering(layer=3))
