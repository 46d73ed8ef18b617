"""The uses that ask through ``MiaClient``, against transformers: hidden states, detectors and schema linking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from guard.mia import MiaClient
from guard.mia.compat import CompatError
from guard.mia.spec import MiaSpec
from guard.uses.asking import Ask, Messages, served
from guard.uses.detectors_offline import score
from guard.uses.hidden_states import extract
from guard.uses.schema_linking import Column, link, prompt
from tests.detectors.weights import build
from tests.engine import oracle
from tests.engine.server import KEY, Server

CHAT: Messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Why is the sky blue?"}]
COLUMNS = [Column("name", "bird"), Column("weight_g", "bird"), Column("id", "ship")]
SIZE = 128


@pytest.fixture
def ask(server: Server) -> Ask:
    return served(MiaClient(f"{server.url}/v1", api_key=KEY), "tiny")


def read(server: Server, messages: Messages, more: list[int] | None = None) -> tuple[str, oracle.Reading]:
    """The prompt, with a character for each token, and transformers' reading of it and of ``more`` tokens."""
    folder = server.folder.parent / "model"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (reading,) = oracle.read(folder, [[*ids, *(more or [])]])
    return str(text).replace("<|start|>", "^").replace("<|end|>", "$"), reading


def test_hidden_states_from_a_server_are_transformers_own(server: Server, ask: Ask) -> None:
    text, truth = read(server, CHAT)
    first, second = extract(ask, [CHAT, CHAT], [1, 3], "prompt")
    for layer in (1, 3):
        assert first[layer].shape == (len(text), SIZE)
        np.testing.assert_allclose(first[layer], truth.stream(layer), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second[layer], first[layer], rtol=1e-4, atol=1e-4)
    assert [one[3].shape for one in extract(ask, [CHAT, CHAT], [3], "generated")] == [(0, SIZE)] * 2


def test_a_detector_of_answers_scores_what_a_server_sends(server: Server, ask: Ask, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    weight = random.normal(size=SIZE).astype(np.float32) / 10
    zeros = np.zeros(SIZE, np.float32)
    tensors: dict[str, Any] = {
        "weight": weight,
        "bias": zeros[:1],
        "mean": zeros,
        "scale": zeros + 1,
        "node_indices": np.zeros(0, np.int64),
        "node_baselines": zeros[:0],
    }
    detector = build(tmp_path, "h_node", tensors, layer=2, hidden_size=SIZE, nodes=0)
    (scored,) = score(ask, detector, [CHAT], max_tokens=6)
    (told,) = ask([(CHAT, MiaSpec.model_validate({"hidden": {"h": {"layer": 2, "positions": "generated"}}}))], 6)
    text, truth = read(server, CHAT, list(told.items["h"].token_ids))  # type: ignore[union-attr]
    logits = truth.stream(2)[len(text) :] @ weight
    assert scored.score.value == pytest.approx(1 / (1 + np.exp(-logits.max())), abs=1e-4)
    assert scored.answer == told.text


def test_columns_are_linked_through_a_server(server: Server, ask: Ask) -> None:
    linked = link(ask, (3, 2), "How heavy is a wren?", COLUMNS, top_p=0.5)
    parts = [part["text"] for part in prompt("How heavy is a wren?", COLUMNS)[0]["content"]]
    text, truth = read(server, [{"role": "user", "content": "\n".join(parts)}])
    begins = [text.index(column.text) for column in COLUMNS]
    row = truth.attention[2][2, -1]
    expected = [row[at : at + len(one.text)].mean() for at, one in zip(begins, COLUMNS, strict=True)]
    np.testing.assert_allclose(linked.scores, expected, atol=1e-6)


def test_an_answer_without_readouts_is_an_error_and_not_an_empty_one(server: Server) -> None:
    with pytest.raises(CompatError, match="no readouts"):
        MiaClient(f"{server.url}/v1", api_key=KEY).read(CHAT, MiaSpec(), "tiny")
