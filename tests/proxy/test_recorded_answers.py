"""What the ledger has of answers is enough to decide them again and to explain them: requests, then the commands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from guard.cli import app
from tests.proxy.conftest import BODY, FLAGGED, Proxy, StartProxy
from tests.proxy.detectors import register
from tests.proxy.engine import FakeEngine, running
from tests.proxy.test_answers import CALM, RETRY
from tests.proxy.test_streaming import LEAK, STREAM, frames, policy

CLEAN = ("all", " is", " fine", ".")
WITHOUT = "rules:\n  - {name: prompt, when: {detector: danger, at_least: 0.9}, action: block, on_error: allow}\n"


@pytest.fixture(autouse=True)
def _detectors(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def guard(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["policy", *map(str, arguments)])
    return done.exit_code, done.output


def without_answer_rules(text: str) -> str:
    return text[: text.index("rules:")] + WITHOUT


@asynccontextmanager
async def served(start_proxy: StartProxy, text: str, scripts: list[tuple[str, ...]]) -> AsyncIterator[Proxy]:
    """A proxy that each of the scripts was streamed through, and then each of them as a whole."""
    engine = FakeEngine(scripts=scripts)
    async with running(engine), start_proxy(engine, text) as proxy:
        for body in (STREAM, BODY):
            for script in scripts:
                engine.scripts = [script]
                await proxy.post(body)
        await proxy.entries(2 * len(scripts))
        yield proxy


def replayed(tmp_path: Path, proxy: Proxy, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "candidate.yaml"
    path.write_text(text)
    code, out = guard("replay", path, "--ledger", proxy.ledger, "--json", *options)
    return code, json.loads(out)


@pytest.mark.parametrize("contract", ["hold", "window", "observe"])
@pytest.mark.parametrize("action", ["block", "flag"])
async def test_the_same_rules_for_answers_change_nothing_and_without_them_it_is_looser(
    start_proxy: StartProxy, tmp_path: Path, contract: str, action: str
) -> None:
    text = policy(contract, action=action)
    async with served(start_proxy, text, [LEAK, CLEAN]) as proxy:
        code, told = replayed(tmp_path, proxy, text)
        assert (code, told["compared"], told["unchanged"]) == (0, 4, {action: 2, "allow": 2})
        code, told = replayed(tmp_path, proxy, without_answer_rules(text), "--fail-on", "looser")
        assert (code, told["looser"], told["unchanged"]) == (1, 2, {"allow": 2})
        stricter = text.replace("at_least: 0.5", "at_least: 0.0")
        code, told = replayed(tmp_path, proxy, stricter, "--fail-on", "stricter")
        assert (code, told["stricter"], told["unchanged"]) == (1, 2, {action: 2})


async def test_scores_of_answers_that_may_not_have_come_in_time_are_never_unchanged(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("hold")
    late = text.replace("stage: stream\n", "stage: stream\n    timeout_s: 0.0001\n")
    longer = text.replace("stage: stream\n", "stage: stream\n    timeout_s: 60\n")
    assert text not in (late, longer)
    async with served(start_proxy, text, [LEAK, CLEAN]) as proxy:
        (tmp_path / "candidate.yaml").write_text(late)
        code, out = guard("replay", tmp_path / "candidate.yaml", "--ledger", proxy.ledger)
        assert "0 requests compared" in out
        assert "4 requests cannot be decided again: not told: whether scores of text would have come in time" in out
        assert code == 4
        assert replayed(tmp_path, proxy, longer)[1]["unchanged"] == {"block": 2, "allow": 2}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("streaming: hold", "streaming: observe"), "streaming hold -> observe"),
        (("window_tokens: 3", "window_tokens: 9"), "window_tokens 3 -> 9"),
    ],
)
async def test_another_contract_for_streams_is_told_as_what_cannot_be_judged_and_is_no_success(
    start_proxy: StartProxy, tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    text = policy("hold")
    async with served(start_proxy, text, [LEAK, CLEAN]) as proxy:
        code, told = replayed(tmp_path, proxy, text.replace(*change))
        assert (code, told["compared"], told["changed"]) == (3, 4, 0)
        assert told["not_judged"] == {f"when streams are judged, and what leaves before a block: {said}": 2}
        assert replayed(tmp_path, proxy, text.replace(*change), "--allow-unjudged")[0] == 0
        _, out = guard("replay", tmp_path / "candidate.yaml", "--ledger", proxy.ledger)
        assert f"  of 2 requests: when streams are judged, and what leaves before a block: {said}" in out
        assert "0 change" in out
        assert replayed(tmp_path, proxy, text)[0] == 0


async def test_a_rule_that_moves_to_another_stage_is_not_judged_on_what_nobody_saw(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    """To the end: of the stream that was cut there is none. To the stream: it was judged at its end alone."""
    stream, output = policy("hold", stage="stream"), policy("hold", stage="output")
    cut, grown = ("the end of answers that a block cut, for rule leak of stage output",
                  "answers while they grew, that were judged at their end, for rule leak of stage stream")  # fmt: skip
    async with served(start_proxy, stream, [LEAK, CLEAN]) as proxy:
        code, told = replayed(tmp_path, proxy, output)
        assert (code, told["not_judged"], told["unchanged"]) == (3, {cut: 1}, {"block": 1, "allow": 2})
    proxy.ledger.unlink()
    async with served(start_proxy, output, [LEAK, CLEAN]) as proxy:
        code, told = replayed(tmp_path, proxy, stream)
        # Of the one that leaked, the end is enough: there rules for streams are judged as well.
        assert (code, told["not_judged"], told["unchanged"]) == (3, {grown: 1}, {"block": 2, "allow": 1})


async def test_an_answer_that_was_cut_and_would_have_gone_on_is_told(start_proxy: StartProxy, tmp_path: Path) -> None:
    text = policy("window")
    async with served(start_proxy, text, [LEAK]) as proxy:
        code, told = replayed(tmp_path, proxy, text.replace("at_least: 0.5", "at_least: 1.5"))
        assert (code, told["looser"], told["cut_short"], told["not_judged"]) == (1, 2, 1, {})
        _, out = guard("replay", tmp_path / "candidate.yaml", "--ledger", proxy.ledger)
        assert "1 of those that change had their answer cut; nobody knows how it would go on" in out


async def test_streams_of_lines_that_do_not_say_their_contract_are_counted(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("hold")
    async with served(start_proxy, text, [CLEAN]) as proxy:
        lines = [json.loads(line) for line in proxy.ledger.read_text().splitlines()]
        for line in lines:
            del line["contract"], line["answer"]["times"]
        proxy.ledger.write_text("\n".join(map(json.dumps, lines)))
        code, told = replayed(tmp_path, proxy, text.replace("streaming: hold", "streaming: observe"))
        assert (code, told["without_contract"], told["not_judged"]) == (0, 1, {})


async def test_a_rule_for_answers_that_nothing_was_measured_for_is_not_compared(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("hold")
    async with served(start_proxy, without_answer_rules(text), [CLEAN]) as proxy:
        path = tmp_path / "candidate.yaml"
        path.write_text(text)
        code, out = guard("replay", path, "--ledger", proxy.ledger)
        assert (code, "2 requests lack a score as this policy measures it: text 2" in out) == (4, True)


async def test_an_answer_that_was_generated_again_is_followed_through_all_its_answers(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    engine = FakeEngine(scripts=[LEAK, CLEAN])
    async with running(engine), start_proxy(engine, RETRY) as proxy:
        await proxy.post(BODY)
        engine.scripts = [LEAK, LEAK]
        await proxy.post(BODY)
        await proxy.entries(2)
        code, told = replayed(tmp_path, proxy, RETRY)
        assert (code, told["unchanged"]) == (0, {"retry": 1, "block": 1})
        other = RETRY.replace(CALM, CALM.replace("coefficient: ", "coefficient: -"))
        code, told = replayed(tmp_path, proxy, other)
        why = "another request to the model after the same action: retry, rule leak"
        assert (code, told["compared"], told["not_judged"]) == (3, 0, {why: 2})
        code, told = replayed(tmp_path, proxy, without_answer_rules(RETRY), "--fail-on", "looser")
        assert (code, told["looser"], told["unchanged"]) == (1, 2, {})


@pytest.mark.parametrize(
    ("action", "more", "changed"),
    [
        ("redact", "    redact: {replacement: '[X]'}\n", ("[X]", "Y")),
        ("block", "    respond: error\n", ("respond: error", "respond: refusal")),
        ("block", "    respond: refusal\n", ("respond: refusal", "respond: error")),
        ("block", "    respond: refusal\n    message: No.\n", ("No.", "Never.")),
    ],
)
async def test_another_text_in_the_place_of_what_a_model_said_is_told(
    start_proxy: StartProxy, tmp_path: Path, action: str, more: str, changed: tuple[str, str]
) -> None:
    text = policy("hold", action=action, more=more)
    async with served(start_proxy, text, [LEAK, CLEAN]) as proxy:
        code, told = replayed(tmp_path, proxy, text)
        assert (code, told["not_judged"]) == (0, {})
        code, told = replayed(tmp_path, proxy, text.replace(*changed))
        why = f"another answer to the client after the same action: {action}, rule leak"
        assert (code, told["changed"], told["not_judged"]) == (3, 0, {why: 2})
        # Where nothing of it applies, nothing is told.
        other = text.replace("at_least: 0.5", "at_least: 0.4")
        assert replayed(tmp_path, proxy, other)[0] == 0


async def test_what_another_decision_on_the_prompt_would_have_brought_is_not_guessed(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("hold").replace("at_least: 0.9", "at_least: 0.3")
    engine = FakeEngine(logit=FLAGGED, scripts=[LEAK])
    async with running(engine), start_proxy(engine, text) as proxy:
        await proxy.post(BODY)
        assert (await proxy.entry())["prompt_action"] == "block"
        code, told = replayed(tmp_path, proxy, policy("hold"), "--fail-on", "looser")
        assert (code, told["looser"], told["prompts_alone"]) == (1, 1, 1)


async def test_lines_that_have_the_first_scores_of_a_stream_are_told_and_not_compared(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("hold", action="flag")
    async with served(start_proxy, text, [LEAK]) as proxy:
        lines = [json.loads(line) for line in proxy.ledger.read_text().splitlines()]
        for line in lines:
            for name in ("complete", "over_time", "at_end", "earlier"):
                del line["answer"][name]
        proxy.ledger.with_name("old.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / "candidate.yaml").write_text(text)
        code, out = guard("replay", tmp_path / "candidate.yaml", "--ledger", proxy.ledger.with_name("old.jsonl"))
        assert "1 requests compared, 0 change" in out
        assert "1 requests cannot be decided again: not told: lines of an older version" in out
        assert code == 0


async def test_of_an_answer_that_nobody_waited_for_it_is_kept_what_rules_made_of_it_until_then(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    more = "  - {name: end, stage: output, when: {detector: text, at_least: 0.5}, action: flag}\n"
    # A rule that could stop the stream has every word judged before it goes.
    more += "  - {name: stop, stage: stream, when: {detector: text, at_least: 1.5}, action: block}\n"
    text = policy("window", action="flag", more=more)
    engine = FakeEngine(scripts=[("secret", *["b", "c", "d", "e", "f"])], answer_delay_s=None)
    async with running(engine), start_proxy(engine, text) as proxy:
        reading = frames(proxy, STREAM)
        assert b"secret" in (await anext(reading))[1]
        await reading.aclose()
        entry = await proxy.entry()
        assert (entry["outcome"], entry["action"], entry["rules"]) == ("client_gone", "flag", ["leak"])
        assert (entry["answer"]["scores"], entry["answer"]["complete"]) == ({"text": 1.0}, False)
        code, told = replayed(tmp_path, proxy, text)
        assert (code, told["unchanged"]) == (0, {"flag": 1})
        _, out = guard(
            "explain", tmp_path / "candidate.yaml", "--request", entry["request_id"], "--ledger", proxy.ledger
        )
        assert "end: not judged: the answer did not come to its end" in out


async def test_a_request_that_a_rule_for_answers_decided_is_explained_by_it(
    start_proxy: StartProxy, tmp_path: Path
) -> None:
    text = policy("window", action="flag")
    async with served(start_proxy, text, [LEAK]) as proxy:
        (tmp_path / "p.yaml").write_text(text)
        for entry in await proxy.entries(2):
            code, out = guard(
                "explain", tmp_path / "p.yaml", "--request", entry["request_id"], "--ledger", proxy.ledger
            )
            assert code == 0
            assert "recorded: flag, rule leak: text 1 >= 0.5\nrecorded of the prompt: allow; of the answer: flag" in out
            assert "leak (stream: flag, severity 5): hit: text 1 >= 0.5 <- decides" in out
            assert "decision on the prompt: allow, no rule hit" in out
            assert out.endswith("decision on both: flag, by rule leak: text 1 >= 0.5\n")
            assert "unavailable" not in out
        code, out = guard("explain", tmp_path / "p.yaml", "--score", "text=0.7", "--score", "danger=0.1")
        assert out.endswith("decision on both: flag, by rule leak: text 0.7 >= 0.5\n")
