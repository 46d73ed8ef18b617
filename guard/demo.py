"""``guard demo``: real requests through the running pair, each shown with what the guard decided and why.

Owns how they are sent and shown; what is asked is in ``guard.demo_requests``. Speaks plain HTTP like any client; scores
come from the ledger, as they would for an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.text import Text

from detectors.numerals import numeral
from guard.data import data_folder, default_policy
from guard.demo_requests import REQUESTS, DemoRequest
from guard.models import DEFAULT_MODEL
from guard.paths import state_folder
from guard.serve import Pair, ServeOptions, run_until_signal, running_pair
from guard.telemetry.ledger_reader import find
from guard.terminal import console, say

LEDGER_PATIENCE_S = 5.0
REQUEST_TIMEOUT_S = 120.0
ACTION_STYLES = {"allow": "green", "flag": "yellow", "steer": "cyan", "block": "bold red"}


@dataclass(frozen=True)
class Outcome:
    """What the client saw, and what the ledger says about it."""

    request: DemoRequest
    status: int
    text: str
    first_byte_ms: float
    total_ms: float
    action: str
    reasons: tuple[str, ...]
    scores: Mapping[str, float]


def demo(*, once: bool, port: int, engine_port: int) -> int:
    """Exit code 0 when at least one request was passed, flagged, steered and blocked each."""
    # What is shown depends on these, so they are not the environment's to choose.
    shown = {"host": "127.0.0.1", "policy": default_policy(), "model_configs": data_folder("model_configs")}
    options = ServeOptions(
        engine_port=engine_port, settings={**shown, "port": port, "ledger": state_folder() / "demo-ledger.jsonl"}
    )
    return run_until_signal(_demo(options, once=once))


async def _demo(options: ServeOptions, *, once: bool) -> int:
    async with running_pair(options) as pair:
        outcomes = [await _show(pair, number, request) for number, request in enumerate(REQUESTS, start=1)]
        missing = missing_actions(outcome.action for outcome in outcomes)
        if missing:
            say(f"Not shown: {', '.join(missing)}. Model, policy or thresholds are not the shipped ones.")
        if not once:
            say(f"\nBoth keep running until Ctrl-C. Try your own:\n\n{curl_command(pair.proxy_url)}\n")
            say(f"Ledger: {pair.ledger}   metrics: {pair.proxy_url}/metrics")
            await pair.wait_ended()
        return 1 if missing else 0


def missing_actions(actions: Iterable[str]) -> list[str]:
    """Which of the four outcomes did not occur."""
    return sorted(ACTION_STYLES.keys() - set(actions))


def curl_command(proxy_url: str) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": DEFAULT_MODEL, "messages": messages, "temperature": 0})
    return f"curl -i {proxy_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"


async def _show(pair: Pair, number: int, request: DemoRequest) -> Outcome:
    outcome = await send(pair, request)
    mode = "streamed" if request.stream else "not streamed"
    console.print(f"\n[bold]{number}. {request.title}[/] ({mode})")
    console.print(Text(f"   user:    {_shorten(request.user)}"))
    scores = ", ".join(f"{name} {numeral(value)}" for name, value in outcome.scores.items()) or "none"
    verdict = Text("   verdict: ").append(outcome.action, ACTION_STYLES.get(outcome.action, ""))
    console.print(verdict.append(f"   scores: {scores}"))
    for reason in outcome.reasons:
        console.print(Text(f"   rule:    {reason}"))
    times = f"first byte after {outcome.first_byte_ms:.0f} ms, all after {outcome.total_ms:.0f} ms"
    console.print(f"   HTTP {outcome.status}, {times}")
    console.print(Text(f"   {'answer' if outcome.status == 200 else 'error'}:  {_shorten(outcome.text)}"))
    if outcome.action == "steer":
        unguarded = await _ask(f"{pair.engine_url}/v1/chat/completions", request)
        console.print(Text(f"   without steering: {_shorten(unguarded.text)}"))
    return outcome


@dataclass(frozen=True)
class _Answer:
    status: int
    text: str
    first_byte_ms: float
    total_ms: float
    headers: Mapping[str, str]


async def send(pair: Pair, request: DemoRequest) -> Outcome:
    """Send ``request`` through the proxy and look it up in the ledger."""
    answer = await _ask(f"{pair.proxy_url}/v1/chat/completions", request)
    entry = await _ledger_entry(pair.ledger, answer.headers.get("x-request-id", ""))
    return Outcome(
        request, answer.status, answer.text, answer.first_byte_ms, answer.total_ms,
        action=str(entry["action"]),
        reasons=tuple(f"{hit['rule']} ({hit['action']}): {hit['reason']}" for hit in entry["hits"]),
        scores={name: value for name, value in entry["scores"].items() if value is not None},
    )  # fmt: skip


async def _ask(url: str, request: DemoRequest) -> _Answer:
    started_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url, json=request.body()) as response:
        first = await response.content.readany()
        first_byte_ms = (time.perf_counter() - started_s) * 1000
        body = first + await response.read()
        total_ms = (time.perf_counter() - started_s) * 1000
        return _Answer(response.status, answer_text(response.status, body), first_byte_ms, total_ms, response.headers)


def answer_text(status: int, body: bytes) -> str:
    """The assistant's words, or the error's message."""
    if status != 200:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return str(json.loads(body)["error"]["message"])
        return body.decode(errors="replace")
    if body.startswith(b"data:"):
        return "".join(_deltas(body))
    return str(json.loads(body)["choices"][0]["message"]["content"])


def _deltas(body: bytes) -> Iterable[str]:
    for line in body.decode().split("\n"):  # a delta may hold U+2028, which splitlines splits at
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                yield choice["delta"].get("content") or ""


async def _ledger_entry(ledger: Path, request_id: str) -> dict[str, Any]:
    """The request's line. It is written just after the answer, so wait for it a little."""
    async with asyncio.timeout(LEDGER_PATIENCE_S):
        while (entry := find(ledger, request_id)) is None:
            await asyncio.sleep(0.02)
    return entry


def _shorten(text: str, width: int = 300) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else f"{flat[: width - 3]}..."
