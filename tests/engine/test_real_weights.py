"""The default model's own weights under CUDA graphs, many requests at once, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.results import AttentionReadout, RowsReadout
from guard.mia.spec import MiaSpec
from guard.models import DEFAULT_MODEL, find_source, is_pulled, model_folder
from tests.engine import engines, oracle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS, STEERED_LAYER = (1, 11, 21, 30), 11
HEADS = ((3, 0), (12, 4), (12, 7), (20, 8), (30, 2))
# The longest takes several chunks of a prompt; the last asks again what is in the prefix cache by then.
LENGTHS = (1, 3, 9, 14, 20, 2, 7, 11, 20)
TOKENS = 24


@dataclass(frozen=True)
class Engine:
    llm: MiaLLM
    folder: Path
    vector: np.ndarray
    tolerance: float
    mass_tolerance: float


@pytest.fixture(scope="module", params=[("float32", 1e-3, 1e-3), ("bfloat16", 6e-2, 5e-2)], ids=lambda p: p[0])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if not is_pulled(source := find_source(DEFAULT_MODEL)):
        pytest.skip("needs the default model: guard model pull")
    dtype, tolerance, mass_tolerance = request.param
    folder, vectors = model_folder(source), tmp_path_factory.mktemp("vectors")
    vector = 2 * torch.randn(576, generator=torch.Generator().manual_seed(3))
    save_file({"vector": vector}, vectors / "push.safetensors")
    config = EngineConfig(
        hidden_layers=LAYERS,
        attention_heads=HEADS,
        max_hidden_rows_per_step=2048,
        steering_layers=(STEERED_LAYER,),
        steering_folder=vectors,
        steering_vectors=("push",),
    )
    with engines.engine(folder, config, compiled=True, dtype=dtype) as llm:
        yield Engine(llm, folder, vector.numpy(), tolerance, mass_tolerance)


def conversation(n: int) -> list[dict[str, str]]:
    said = [f"Point {i}: the {('red', 'green', 'old')[i % 3]} house number {i * n} is for sale." for i in range(n)]
    return [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": " ".join(said)}]


def test_many_requests_at_once_read_and_steer_what_transformers_computes(engine: Engine) -> None:
    captures = {
        "spans": {"system": "system", "data": "user.last"},
        "hidden": {str(layer): {"layer": layer, "positions": "all"} for layer in LAYERS},
        "attention": {"share": {"heads": HEADS, "spans": ["system", "data"]}},
    }
    steer = {"vector": "push", "layer": STEERED_LAYER}
    coefficients = [0.5 * (i % 3) for i in range(len(LENGTHS))]
    specs = [
        MiaSpec.model_validate({**captures, "steer": [{**steer, "coefficient": c}] if c else []}) for c in coefficients
    ]
    answers = engine.llm.chat([conversation(n) for n in LENGTHS], specs, max_tokens=TOKENS, ignore_eos=True)
    worst: dict[str, float] = {}
    for answer, coefficient in zip(answers, coefficients, strict=True):
        ids = answer.prompt_token_ids + answer.token_ids[:-1]
        pushes = [oracle.Push(STEERED_LAYER, coefficient, engine.vector)] if coefficient else []
        (truth,) = oracle.read(engine.folder, [ids], *pushes)
        for layer in LAYERS:
            rows = answer.items[str(layer)]
            assert isinstance(rows, RowsReadout)
            assert (rows.status, rows.positions) == ("complete", tuple(range(len(ids))))
            expected = truth.hidden[layer - 1]
            off = np.linalg.norm(rows.values - expected) / np.linalg.norm(expected)
            worst[str(layer)] = max(worst.get(str(layer), 0.0), float(off))
        share, at = answer.items["share"], len(answer.prompt_token_ids) - 1
        assert isinstance(share, AttentionReadout)
        for span in ("system", "data"):
            tokens = [t for start, end in answer.readouts[0].span_tokens[span] for t in range(start, end)]
            mass = [truth.attention[layer - 1][head][at, tokens].sum() for layer, head in HEADS]
            off = np.abs(np.asarray(share.mass[span]) - mass).max()
            worst[span] = max(worst.get(span, 0.0), float(off))
    print(f"worst relative error by layer, absolute by span: {worst}")
    assert max(worst[str(layer)] for layer in LAYERS) <= engine.tolerance, worst
    assert max(worst[span] for span in ("system", "data")) <= engine.mass_tolerance, worst


def test_steering_changes_answers_and_its_absence_does_not(engine: Engine) -> None:
    conversations = [conversation(n) for n in (2, 5)]
    nothing = MiaSpec.model_validate({"hidden": {"h": {"layer": 1}}})
    steered = MiaSpec.model_validate({"steer": [{"vector": "push", "layer": STEERED_LAYER, "coefficient": 3.0}]})
    before, pushed, after = (
        engine.llm.chat(conversations, spec, max_tokens=TOKENS, ignore_eos=True) for spec in (nothing, steered, nothing)
    )
    assert [a.token_ids for a in before] == [a.token_ids for a in after]
    assert all(a.token_ids != b.token_ids for a, b in zip(before, pushed, strict=True))
