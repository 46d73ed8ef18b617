"""How answers of other providers end, in forms that no provider of the other tests has."""

from __future__ import annotations

import base64

import pytest

from guard.proxy.provider_endings import Endings

AWS = "application/vnd.amazon.eventstream"


def bytewise(stream: bytes, content_type: str) -> Endings:
    read = Endings(content_type)
    for i in range(len(stream)):
        read.add(stream[i : i + 1])
    return read


@pytest.mark.parametrize(
    "stream",
    [
        b'\x00\x00\x01{"delta":{"text":"\\"stopReason\\":\\"x\\""}}\x00\n\x02{"stopReason":"max_tokens"}\xff',
        b'\x00\x02{"bytes":"%s"}\xff' % base64.b64encode(b'{"delta":{"stop_reason":"max_tokens"}}'),
    ],
    ids=["events", "events within events"],
)
def test_an_ending_is_found_in_binary_events(stream: bytes) -> None:
    read = bytewise(stream, AWS)
    assert (read.found(), read.odd) == ({0: "max_tokens"}, False)


def test_what_a_model_says_is_no_ending() -> None:
    call = b'{"candidates":[{"content":{"parts":[{"functionCall":{"args":{"finishReason":"STOP"}}}]}}]}'
    text = b'{"choices":[{"delta":{"content":"{\\"finish_reason\\": \\"stop\\"}"},"finish_reason":null}]}'
    read = bytewise(b"data: " + call + b"\n\ndata: " + text + b"\n\n: ping\n\n", "text/event-stream")
    assert (read.found(), read.odd) == ({}, False)


def test_a_cohere_event_and_one_of_vllm_with_a_stop_word() -> None:
    end = b'event: message-end\ndata: {"type":"message-end","delta":{"finish_reason":"COMPLETE"}}\n\n'
    assert bytewise(end, "text/event-stream").found() == {0: "COMPLETE"}
    stopped = b'data: {"choices":[{"index":1,"delta":{},"finish_reason":"stop","stop_reason":"###"}]}\n\n'
    assert bytewise(stopped, "text/event-stream").found() == {1: "stop"}
