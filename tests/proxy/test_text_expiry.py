"""How long captured text is kept counts from the day of the request, whenever it is written."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime

from guard.policy.capture import Capture
from guard.proxy.body import parse_request
from guard.proxy.capturing import Capturing
from guard.proxy.wire_choices import chat_form
from tests.telemetry.records import record


def test_text_that_is_written_days_later_is_kept_no_longer() -> None:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()
    came = record(started_at=datetime(2026, 1, 30, 23, 59, tzinfo=UTC))
    capture = Capture(prompt=True, retention_days=3)
    assert Capturing(capture, parse_request(chat_form, body), came).captured().expires == date(2026, 2, 2)
