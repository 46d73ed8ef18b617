"""What the demo shows, and that the shipped model, policy and thresholds really do what it says."""

from __future__ import annotations

import json
import shlex

import pytest

from guard.demo import answer_text, curl_command, missing_actions, send
from guard.demo_requests import REQUESTS
from guard.serve import Pair
from tests.conftest import RunningPair


def test_all_four_outcomes_must_be_seen() -> None:
    assert missing_actions(["allow", "flag", "steer", "block", "allow"]) == []
    assert missing_actions(["allow", "block"]) == ["flag", "steer"]


def test_an_answer_is_read_streamed_or_not_and_an_error_by_its_message() -> None:
    plain = {"choices": [{"message": {"content": "Paris."}}]}
    assert answer_text(200, json.dumps(plain).encode()) == "Paris."
    chunks = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Par"}}]},
    ]
    chunks += [{"choices": [{"delta": {"content": "is."}}]}, {"choices": [], "usage": {}}]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    assert answer_text(200, stream.encode()) == "Paris."
    assert answer_text(400, b'{"error": {"message": "no", "code": "content_filter"}}') == "no"
    assert answer_text(502, b"Bad gateway") == "Bad gateway"


def test_the_printed_curl_command_is_one_that_a_shell_and_a_server_understand() -> None:
    words = shlex.split(curl_command("http://127.0.0.1:8080"))
    assert words[:3] == ["curl", "-i", "http://127.0.0.1:8080/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "smollm2-135m"


@pytest.mark.engine
async def test_the_demos_requests_are_passed_flagged_steered_and_blocked(running_pair: RunningPair) -> None:
    pair = Pair(running_pair.engine_url, running_pair.proxy_url, running_pair.ledger_path)
    outcomes = [await send(pair, request) for request in REQUESTS]
    assert missing_actions(outcome.action for outcome in outcomes) == []
    assert {outcome.status for outcome in outcomes if outcome.action == "block"} == {400}
    assert {outcome.status for outcome in outcomes if outcome.action != "block"} == {200}
    assert {outcome.request.stream for outcome in outcomes if outcome.action == "block"} == {True, False}
    assert all(outcome.text for outcome in outcomes)
    assert all(outcome.scores for outcome in outcomes)
