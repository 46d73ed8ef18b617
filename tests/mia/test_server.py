"""What the middleware does once, and not for every request: vLLM's answers to some questions take milliseconds."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from guard.mia.frontend import _current
from guard.mia.server import MiaMiddleware

SPEC = {"attention": {"a": {"heads": [[1, 0]], "spans": ["s"]}}, "spans": {"s": {"tokens": [[0, 1]]}}}
ASKED = {"vllm_xargs": {"mia": json.dumps(SPEC)}}


class SlowToSay:
    """A vLLM configuration of an engine on CUDA that counts how often it is asked what takes long."""

    def __init__(self) -> None:
        self.additional_config = {"mia": {"attention_heads": [[1, 0]]}}
        self.device_config = SimpleNamespace(device_type="cuda")
        self.model_config = SimpleNamespace(get_hidden_size=lambda: 64)
        self.asked = 0

    @property
    def use_v2_model_runner(self) -> bool:
        # vLLM 0.29 goes through the metadata of all installed packages here: 25 ms of everybody's event loop.
        self.asked += 1
        return True


async def test_what_an_engine_is_is_asked_once_and_known_to_every_request() -> None:
    config, known = SlowToSay(), []

    async def engine(_scope: Any, _receive: Any, _send: Any) -> None:
        context = _current.get()
        assert context is not None
        known.append(context.engine)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(ASKED).encode()}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    app = SimpleNamespace(state=SimpleNamespace(vllm_config=config, args=SimpleNamespace(api_key=None)))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": app}
    app.state.engine_client = SimpleNamespace(collective_rpc=None)
    middleware = MiaMiddleware(engine)
    for _ in range(5):
        await middleware(scope, receive, send)
    assert [(one.keys_from_cache, one.hidden_size) for one in known] == [(True, 64)] * 5
    assert config.asked == 1
