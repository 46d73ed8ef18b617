"""The client of the served part, in a process of its own: sends requests at their times, notes when what came.

Reads one plan as JSON from stdin, writes one line of JSON for each request to stdout, in the plan's order. Times are
seconds of this process's clock, from the request's sending. Looks at no token: the server was told how many to make.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp

from bench.engine_child import token_ids
from bench.shapes import load_shape
from bench.variants import SERVED, taps_of

TOKEN_EVENT = b'data: {"id"'
READOUT_EVENT = b'data: {"object": "mia.readouts"'
LIMIT_S = 300.0


@dataclass
class Observed:
    """One answer. ``token_events``: server-sent events with tokens; a busy server puts several tokens into one."""

    at_s: float
    sent_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    readout_s: float | None = None
    token_events: int = 0
    error: str = ""


async def ask(session: aiohttp.ClientSession, url: str, body: bytes, observed: Observed, origin_s: float) -> None:
    """Send one request at its time and follow its stream to the end."""
    await asyncio.sleep(max(0.0, origin_s + observed.at_s - time.perf_counter()))
    sent_s = time.perf_counter()
    observed.sent_s = sent_s - origin_s
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            if answer.status != 200:
                observed.error = f"{answer.status}: {(await answer.text())[:300]}"
                return
            rest = b""
            async for chunk in answer.content.iter_any():
                now_s = time.perf_counter() - sent_s
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    note(observed, event, now_s)
    except (aiohttp.ClientError, TimeoutError) as error:
        observed.error = f"{type(error).__name__}: {error}"


def note(observed: Observed, event: bytes, now_s: float) -> None:
    """What one server-sent event says about the answer that it is part of."""
    if event.startswith(TOKEN_EVENT):
        observed.token_events += 1
        if observed.first_token_s is None:
            observed.first_token_s = now_s
        observed.last_token_s = now_s
    elif event.startswith(READOUT_EVENT) and observed.readout_s is None:
        observed.readout_s = now_s


def bodies(plan: dict[str, Any]) -> list[bytes]:
    """Requests as they are sent: prompts are token ids that no other window has."""
    shape = load_shape(plan["shape"])
    variant, taps = SERVED[plan["variant"]], taps_of(shape)
    made = []
    for i, arrival in enumerate(plan["arrivals"]):
        body: dict[str, Any] = {
            "model": shape.name,
            "prompt": token_ids(shape, arrival["prompt_tokens"], plan["seed"], i),
            "max_tokens": arrival["output_tokens"],
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        if (asked := variant.ask(taps, i, arrival["prompt_tokens"])) is not None:
            body["vllm_xargs"] = asked
        made.append(json.dumps(body).encode())
    return made


async def main(plan: dict[str, Any]) -> list[Observed]:
    made = bodies(plan)
    answers = [Observed(a["at_s"], 0.0, a["prompt_tokens"], a["output_tokens"]) for a in plan["arrivals"]]
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session:
        gc.collect()
        gc.disable()
        origin_s = time.perf_counter() + 0.1
        url = plan["url"] + "/v1/completions"
        await asyncio.gather(*(ask(session, url, body, one, origin_s) for body, one in zip(made, answers, strict=True)))
    return answers


if __name__ == "__main__":
    for observed in asyncio.run(main(json.load(sys.stdin))):
        print(json.dumps(asdict(observed)))
