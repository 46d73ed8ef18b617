"""Texts are kept only where a policy says so, without what it wants taken out, and never in the ledger itself."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from guard.policy import PolicyError, load_policy
from guard.policy.judged_paths import EMBEDDINGS, RERANK
from guard.telemetry.content import AnswerText, Captured, PromptText, delete_expired
from guard.telemetry.ledger_check import check
from guard.telemetry.ledger_files import content_folder
from guard.telemetry.ledger_reader import captured
from tests.proxy.conftest import BLOCKED, BODY, POLICY, Proxy, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_answers import DRIFTING
from tests.proxy.test_endpoints import RERANKED, reranking
from tests.proxy.test_streaming import LEAK, chunks, policy, said

CAPTURE = POLICY + "capture: {prompt: true, answer: true, patterns: {colour: 'blue|green'}, retention_days: 3}\n"
KEPT = "capture: {prompt: true, answer: true}\n"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "I am jo@mail.example, and blue"}]},
]
PRIVATE = ("Be brief", "mail.example", "answer is 42")


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


async def kept(proxy: Proxy, entries: int = 1) -> Captured:
    entry = (await proxy.entries(entries))[-1]
    found = captured(proxy.ledger, entry["request_id"])
    assert found is not None
    assert found.intact
    return found


def files(ledger: Path) -> str:
    return "".join(file.read_text() for file in content_folder(ledger).iterdir())


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_are_kept_redacted_and_for_as_long_as_the_policy_says(
    start_proxy: StartProxy, stream: bool
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post({**BODY, "messages": MESSAGES, "stream": stream})
        found = await kept(proxy)
        assert found.prompt == (
            PromptText(0, "system", "Be brief."),
            PromptText(1, "user", "I am [email], and [colour]"),
        )
        assert found.answer == (AnswerText(0, "content", "The answer is 42."),)
        assert (found.redactions, found.truncated, found.policy) == ({"email": 1, "colour": 1}, False, "test")
        assert found.expires == datetime.now(UTC).date() + timedelta(days=3)
        assert not any(text in proxy.ledger.read_text() for text in PRIVATE)
        assert check(proxy.ledger).problems == []
        assert "mail.example" not in files(proxy.ledger)


async def test_query_and_documents_to_rank_are_kept_as_texts_to_embed_are(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = f"""version: 1
name: p
detectors: {{text: {{kind: words}}}}
rules: [{{name: bad, when: {{detector: text, at_least: 0.5}}, action: block}}]
{KEPT}"""
    async with running(FakeEngine()) as engine, start_proxy(engine, text, **reranking(tmp_path)) as proxy:
        for i, (path, body, roles) in enumerate(
            (
                (RERANK[0], RERANKED, ("user", "tool", "tool")),
                (EMBEDDINGS, {"model": "tiny", "input": ["q", "a secret", "b"]}, ("prompt",) * 3),
            ),
            start=1,
        ):
            assert (await proxy.post(body, path=path))[0] == 400
            found = (await kept(proxy, i)).prompt
            assert [one.text for one in found] == ["q", "a secret", "b"]
            assert tuple(one.role for one in found) == roles


async def test_nothing_is_kept_without_the_policys_word(proxy: Proxy) -> None:
    await proxy.post()
    assert (await proxy.entry())["captured"] is None
    assert not content_folder(proxy.ledger).exists()


async def test_only_the_side_that_the_policy_names_is_kept(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, POLICY + "capture: {answer: true}\n") as proxy:
        await proxy.post()
        found = await kept(proxy)
        assert (found.prompt, found.answer) == ((), (AnswerText(0, "content", "The answer is 42."),))
        assert "private words" not in files(proxy.ledger)


async def test_of_a_blocked_prompt_the_prompt_is_kept_and_no_answer(start_proxy: StartProxy) -> None:
    engine = FakeEngine(logit=BLOCKED, answer_delay_s=None)
    async with running(engine), start_proxy(engine, CAPTURE) as proxy:
        await proxy.post()
        found = await kept(proxy)
        assert (found.prompt, found.answer) == ((PromptText(0, "user", "private words"),), ())


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_blocked_answer_what_was_judged_is_kept_as_withheld(start_proxy: StartProxy, stream: bool) -> None:
    engine = FakeEngine(final_logits=[3.0])
    async with running(engine), start_proxy(engine, DRIFTING + KEPT) as proxy:
        status, _, body = await proxy.post({**BODY, "stream": stream})
        assert status == 400, body
        found = await kept(proxy)
        assert found.answer == (AnswerText(0, "content", "The answer is 42.", withheld=True),)


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_model_servers_error_its_words_are_kept_as_withheld_and_are_not_in_the_log(
    start_proxy: StartProxy, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    said = '{"error": {"message": "cannot parse what the model wrote", "code": 500}}'
    engine = FakeEngine(frames=[f"data: {said}\n\n".encode()], later_error=500, later_body=json.loads(said))
    async with running(engine), start_proxy(engine, DRIFTING + KEPT) as proxy:
        _, _, body = await proxy.post({**BODY, "stream": stream})
        (error,) = (await kept(proxy)).answer
        assert (error.channel, error.withheld, json.loads(error.text)) == ("error", True, json.loads(said))
        assert b"what the model wrote" not in body
    assert "what the model wrote" not in caplog.text


async def test_of_a_stream_that_is_cut_what_went_and_what_was_withheld_are_kept_apart(start_proxy: StartProxy) -> None:
    engine = FakeEngine(scripts=[LEAK], word_delay_s=0.02)
    async with running(engine), start_proxy(engine, policy("window") + KEPT) as proxy:
        _, _, body = await proxy.post({**BODY, "stream": True})
        went, withheld = (await kept(proxy)).answer
        assert (went.withheld, withheld.withheld) == (False, True)
        assert went.text == said(chunks(body))
        assert "secret" not in went.text
        assert withheld.text.startswith(went.text)
        assert "secret" in withheld.text


async def test_an_embeddings_texts_are_kept(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post({"model": "tiny", "input": ["one", "two"]}, path="/v1/embeddings")
        assert [one.text for one in (await kept(proxy)).prompt] == ["one", "two"]


async def test_a_long_answer_is_kept_as_far_as_there_is_room(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guard.proxy.capturing.MAX_CHARACTERS", 14)
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post()
        found = await kept(proxy)
        assert found.truncated
        assert (found.prompt[0].text, found.answer[0].text) == ("private wo", "The ans")


async def test_a_role_that_a_client_made_up_is_redacted_bounded_and_counted(start_proxy: StartProxy) -> None:
    parts = [{"type": "text", "text": "hello"}] * 40
    messages = [{"role": f"jo@mail.example {'r' * 300_000}", "content": parts}, {"role": "user", "content": "and"}]
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post({**BODY, "messages": messages})
        found = await kept(proxy)
        assert [one.role[:12] for one in found.prompt] == ["[email] rrrr", "user"]
        assert (found.truncated, found.redactions) == (True, {"email": 1})
        assert len(files(proxy.ledger)) < 2_000


async def test_many_messages_without_words_take_no_more_room_than_words(
    start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guard.proxy.capturing.MAX_CHARACTERS", 100)
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post({**BODY, "messages": [{"role": "user", "content": ""}] * 1000})
        found = await kept(proxy)
        assert found.truncated
        assert len(found.prompt) < 30


async def test_a_secret_that_goes_over_two_parts_of_a_message_is_taken_out(start_proxy: StartProxy) -> None:
    parts = [{"type": "text", "text": text} for text in ("my password=", "hunter2xyz", "is old")]
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post({**BODY, "messages": [{"role": "user", "content": parts}]})
        assert (await kept(proxy)).prompt == (PromptText(0, "user", "my password=\n[secret]\nis old"),)


async def test_text_that_cannot_be_written_costs_no_entry_and_is_not_in_the_log(
    start_proxy: StartProxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        content_folder(proxy.ledger).write_text("a file where the folder should be")
        with caplog.at_level(logging.DEBUG, logger="guard.ledger"):
            await proxy.post({**BODY, "messages": MESSAGES})
            assert (await proxy.entry())["captured"] is None
        assert "could not be kept" in caplog.text
        assert not any(text in caplog.text for text in PRIVATE)


async def test_deleting_text_leaves_the_chain_whole(start_proxy: StartProxy) -> None:
    async with running(FakeEngine()) as engine, start_proxy(engine, CAPTURE) as proxy:
        await proxy.post()
        found = await kept(proxy)
        folder = content_folder(proxy.ledger)
        assert delete_expired(folder, found.expires) == 0
        assert delete_expired(folder, found.expires + timedelta(days=1)) == 1
        assert captured(proxy.ledger, found.request_id) is None
        assert check(proxy.ledger).problems == []


async def test_what_is_over_is_deleted_when_the_proxy_starts(start_proxy: StartProxy, tmp_path: Path) -> None:
    folder = content_folder(tmp_path / "ledger.jsonl")
    folder.mkdir()
    old, other = folder / "2020-01-01.jsonl", folder / "notes.txt"
    old.write_text("{}\n")
    other.write_text("somebody's")
    async with running(FakeEngine()) as engine, start_proxy(engine) as proxy:
        await proxy.post()
        await proxy.entry()
    assert (old.exists(), other.exists()) == (False, True)


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        ("{}", "keeps nothing"),
        ("{prompt: true, patterns: {a: '('}}", "a is no regular expression"),
        ("{prompt: true, patterns: {a: '(?=b)c'}}", "a is no regular expression that RE2 takes: invalid perl operator"),
        ("{prompt: true, patterns: {a: 'x*'}}", "a matches nothing at all"),
        ("{prompt: true, redact: [names]}", "must be 'secrets', 'emails' or 'cards'"),
        ("{prompt: true, retention_days: 0}", "must be at least 1"),
    ],
)
def test_a_capture_that_makes_no_sense_is_refused_with_its_place(tmp_path: Path, capture: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(POLICY + f"capture: {capture}\n")
    with pytest.raises(PolicyError, match=rf"p\.yaml:\d+.*{message}"):
        load_policy(path)


def test_a_policy_without_capture_keeps_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(POLICY)
    before: Any = load_policy(path).hash
    path.write_text(CAPTURE)
    assert load_policy(path).hash != before
    assert json.loads(load_policy(path).policy.model_dump_json())["capture"]["retention_days"] == 3
