"""One prompt through policies side by side, each judged and answered exactly as a client's request would be.

Owns the way in: a request without a socket. What happens to it is the proxy's; it has its line in the ledger, under the
administrator's key and the assignment ``console``, and is not counted in metrics, which are about traffic.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Receive

from guard.console.contents import Content, Contents
from guard.data import data_folder
from guard.policy import BoundPolicy, PolicyError, bind, build_detectors, load_policy
from guard.policy.judges import judges
from guard.policy.policy_set import policy_files
from guard.policy.selection import PLAYGROUND
from guard.proxy.body import GuardedRequest
from guard.proxy.chat import guarded
from guard.proxy.exchange import Exchange
from guard.proxy.keys import Caller
from guard.proxy.recording import answer
from guard.proxy.services import Services
from guard.proxy.wire import Form
from guard.proxy.wire_choices import chat_form
from guard.telemetry.recent import Finished
from guard.telemetry.record import RequestRecord


@dataclass(frozen=True)
class Run:
    """``body``: what a client would have got, None where that is no JSON."""

    finished: Finished
    status: int
    body: Any


@dataclass
class Playground:
    """``choices`` are the policies that judge now and, where this model has what they need, those that ship."""

    services: Services
    contents: Contents
    _shipped: dict[str, BoundPolicy] | None = None

    def choices(self) -> dict[str, BoundPolicy]:
        """By name. Blocks on files the first time."""
        if self._shipped is None:
            self._shipped = dict(self._bound_shipped())
        policies = self.services.policies
        live = {one.name: one for one in policies.current.policies}
        shipped = {name: one.computed_by(policies.probes) for name, one in self._shipped.items() if name not in live}
        return {**live, **shipped}

    def _bound_shipped(self) -> list[tuple[str, BoundPolicy]]:
        found, settings = [], self.services.settings
        for file in policy_files(data_folder("policies")):
            try:
                loaded = load_policy(file)
                one = bind(loaded, build_detectors(loaded, settings.config_key, settings.model_configs))
            except PolicyError:
                continue  # nothing of this model's, so nothing to try here
            found.append((one.name, one))
        return found

    async def run(
        self, policies: list[BoundPolicy], request: GuardedRequest[Form], caller: Caller, receive: Receive
    ) -> list[Run]:
        """At once, so that both meet the same engine. ``receive``: says when whoever wants them leaves, which ends
        them."""
        return list(await asyncio.gather(*(self._run(one, request, caller, receive) for one in policies)))

    async def _run(self, policy: BoundPolicy, request: GuardedRequest[Form], caller: Caller, receive: Receive) -> Run:
        services = self.services
        record = RequestRecord(
            chat_form.route,
            policy.name,
            policy.hash,
            key=caller.key_id,
            model=request.model,
            assignment=PLAYGROUND,
        )
        sent = _Sent()
        scope = {"type": "http", "method": "POST", "path": chat_form.route, "headers": []}
        exchange = Exchange(scope, receive, sent.send, record, caller=caller)
        exchange.judges = both = judges(policy, None)

        async def work() -> None:
            async with services.admission.room(caller, lambda: record.tokens):
                record.began_s = time.perf_counter()
                await guarded(services, exchange, request, both, record.began_s)

        services.under_way += 1
        try:
            await answer(exchange, exchange.until_client_leaves(work()))
        finally:
            record.total_s = time.perf_counter() - record.started_s
            services.ledger.append(record.to_entry())
            finished = services.recent.add(record, exchange.judges)
            services.under_way -= 1
        body = sent.json()
        self.contents.keep(record.request_id, Content(request.fields, text_of(body)))
        return Run(finished, sent.status, body)


@dataclass
class _Sent:
    """What would have gone to a client."""

    status: int = 0
    parts: list[bytes] = field(default_factory=list)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.parts.append(message.get("body", b""))

    def json(self) -> Any:
        try:
            return json.loads(b"".join(self.parts))
        except ValueError:
            return None


def text_of(body: Any) -> str:
    """What a chat completion says; empty for an error."""
    if not isinstance(body, Mapping) or not isinstance(body.get("choices"), list) or not body["choices"]:
        return ""
    content = body["choices"][0].get("message", {}).get("content")
    return content if isinstance(content, str) else ""
