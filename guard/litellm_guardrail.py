"""The guard's policies as a guardrail of LiteLLM's own proxy, for people who run that one.

    guardrails:
      - guardrail_name: mia
        litellm_params:
          guardrail: guard.litellm_guardrail.MiaGuardrail
          mode: [pre_call, post_call]
          default_on: true
          policy: /etc/guard/texts.yaml
          engine: http://vllm:8000

Owns the way between LiteLLM's hooks and a policy. Texts are judged here. What the model computes inside is read by a
request of its own to ``engine``, a vLLM with the plugin, for one token; where LiteLLM's answer comes from the same one,
its prefix cache has the prompt by then. LiteLLM is not changed, and nothing passes that the policy would block.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import HTTPException
from litellm.integrations.custom_guardrail import CustomGuardrail, log_guardrail_information
from litellm.types.guardrails import GuardrailEventHooks
from litellm.types.router import CredentialLiteLLMParams
from litellm.types.utils import StandardCallbackDynamicParams

from guard.data import data_folder
from guard.litellm_answer import Part, parts_of, whole_part
from guard.litellm_request import View, view_of
from guard.policy import Decision, Judges, PolicyError, Question, bind, build_detectors, load_policy
from guard.policy.judges import judges
from guard.proxy.body import OURS
from guard.proxy.chat import redacted_and_routed
from guard.proxy.client_threads import ClientThreads, TextThreads
from guard.proxy.embeddings import NOT_READ, as_decided, embeddings_form, prompts_of
from guard.proxy.errors import ApiError
from guard.proxy.judging import AnswerJudge
from guard.proxy.readouts import Finding, from_event, split_field
from guard.proxy.text_judged import joined_of, judged_each
from guard.proxy.verdict import judge, read_texts
from guard.proxy.wire_choices import chat_form
from guard.telemetry.record import RequestRecord

KEYS_OF_OTHERS = frozenset((*StandardCallbackDynamicParams.__annotations__, *CredentialLiteLLMParams.model_fields))
"""Fields by which LiteLLM, or an operator's settings of a team, say where and as whom providers and logs are asked."""

ACTIONS = ("block", "flag", "redact")
NO_ENGINE = "no vLLM with the plugin is configured for this guardrail (engine)"
NOTE = "mia_guard"
"""Where in a request's metadata the decision is, for LiteLLM's own logs."""


class MiaGuardrail(CustomGuardrail):  # type: ignore[misc]
    """One policy, as ``policy`` says it.

    ``config_key`` and ``model_configs``: the calibrations, as the proxy's settings of these names. ``engine``: base URL
    of a vLLM with the plugin and the taps that the policy needs, ``engine_model`` its model's name if that is not the
    client's, ``engine_api_key_env`` the environment variable with its key. ``harmless_fields``: further fields of
    requests that no model reads; those that the guard does not know are refused. Other options are LiteLLM's.

    Raises ``PolicyError``, for rules too that LiteLLM has no way for: those that steer, retry or route, and those of a
    stage that the guardrail's mode leaves out.
    """

    def __init__(
        self,
        policy: str,
        config_key: str = "SmolLM2-135M-Instruct",
        model_configs: str | None = None,
        engine: str | None = None,
        engine_model: str | None = None,
        engine_api_key_env: str | None = None,
        harmless_fields: Sequence[str] = (),
        **options: Any,
    ) -> None:
        hooks = [GuardrailEventHooks.pre_call, GuardrailEventHooks.post_call]
        super().__init__(supported_event_hooks=hooks, **options)
        loaded = load_policy(Path(policy))
        called = _hooks(options.get("event_hook"))
        for i, rule in enumerate(loaded.policy.rules):
            needed = "pre_call" if rule.stage == "prompt" else "post_call"
            if called is not None and needed not in called and rule.mode == loaded.policy.mode == "enforce":
                raise loaded.error(("rules", i), f"LiteLLM would never ask it: add {needed} to the guardrail's mode")
            if rule.action not in ACTIONS and rule.mode == loaded.policy.mode == "enforce":
                raise loaded.error(("rules", i, "action"), f"inside LiteLLM a rule can {', '.join(ACTIONS)}")
        folder = Path(model_configs) if model_configs else data_folder("model_configs")
        self._judges: Judges = judges(bind(loaded, build_detectors(loaded, config_key, folder)), None)
        self._threads = ClientThreads()
        self._harmless = frozenset((*harmless_fields, *KEYS_OF_OTHERS))
        self._engine = engine.rstrip("/").removesuffix("/v1") if engine else ""
        self._engine_model = engine_model
        key = os.environ.get(engine_api_key_env) if engine_api_key_env else None
        if engine_api_key_env and not key:
            raise PolicyError(f"the environment has no {engine_api_key_env}, which is to hold the engine's key")
        self._engine_headers = {"authorization": f"Bearer {key}"} if key else {}

    @log_guardrail_information  # type: ignore[untyped-decorator]
    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Judge a request. The same ``data`` goes on, with the texts that rules redact replaced."""
        with _told():
            view = view_of(call_type, data, self._harmless)
        threads = self._threads_of(user_api_key_dict)
        decision = await (self._embed if view.request.form is embeddings_form else self._decide)(view, threads)
        data.setdefault(_notes_in(data), {})[NOTE] = _note(decision)
        if decision.action == "block":
            raise _blocked(decision)
        return data

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> Any:
        """Judge a whole answer."""
        if not self._judges.judges_answers:
            return response
        with _told():
            part = whole_part(response)
        if part is None:
            return response
        await self._judge_answer([part], self._threads_of(user_api_key_dict))
        return part.back()

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: AsyncIterator[Any], request_data: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Judge a streamed answer, which is held to its end where rules judge answers."""
        if not self._judges.judges_answers:
            async for chunk in response:
                yield chunk
            return
        chunks = [chunk async for chunk in response]
        with _told():
            parts = parts_of(chunks)
        await self._judge_answer(parts, self._threads_of(user_api_key_dict))
        for part in parts:
            yield part.back()

    async def async_post_call_response_headers_hook(self, data: dict[str, Any], **_: Any) -> dict[str, str]:
        """What was decided, under the proxy's names."""
        note = (data.get(_notes_in(data)) or {}).get(NOTE)
        if note is None:
            return {}
        headers = {"x-guard-policy": self._judges.live.label, "x-guard-action": note["action"]}
        return headers | ({"x-guard-rules": ",".join(note["rules"])} if note["rules"] else {})

    def _threads_of(self, user_api_key_dict: Any) -> TextThreads:
        return self._threads.of(getattr(user_api_key_dict, "api_key", None))

    async def _decide(self, view: View, threads: TextThreads) -> Decision:
        request, live = view.request, self._judges.live
        roles, route = request.roles, request.form.route
        reads = self._engine and route == chat_form.route
        asked = self._judges.ask(roles, request.unplaced)
        if not reads:
            asked = self._judges.ask_unread(roles, NO_ENGINE, request.unplaced)
        reading = self._read(view, asked) if asked.reads else _nothing()
        texts, finding = await asyncio.gather(read_texts(self._judges, request, threads), reading)
        decision = judge(self._judges, asked, finding, RequestRecord(route, live.name, live.hash), texts)
        view.take(redacted_and_routed(request, decision, self._judges))
        return decision

    async def _embed(self, view: View, threads: TextThreads) -> Decision:
        """Each prompt by itself, as the proxy does."""
        found = await judged_each(self._judges, prompts_of(view.request), NOT_READ, threads)
        view.take(await as_decided(view.request, [one.decision for one in found], self._judges, threads))
        return joined_of(self._judges, found).decision

    async def _read(self, view: View, asked: Question) -> Finding:
        """One token of an answer that nobody gets, for the readouts of its prompt."""
        fields = {**view.prompt, "max_tokens": 1, "vllm_xargs": {OURS: asked.wire}}
        if self._engine_model is not None:
            fields["model"] = self._engine_model
        limit_s = self._judges.hold_s(asked) or self._judges.live.prompt_timeout_s
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit_s)) as session,
                session.post(
                    self._engine + view.request.form.route, json=fields, headers=self._engine_headers
                ) as answer,
            ):
                body = await answer.read()
        except TimeoutError:
            return Finding(None, f"no readouts within {limit_s:g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            return Finding(None, f"the engine cannot be asked ({type(error).__name__})")
        event = split_field(body)[1]
        if answer.status != 200 or event is None:
            return Finding(None, f"the engine sent no readouts (status {answer.status})")
        return from_event(event, time.perf_counter())

    async def _judge_answer(self, parts: Sequence[Part], threads: TextThreads) -> None:
        """Takes out of an answer's parts what rules redact. Raises for a block."""
        answer = AnswerJudge(self._judges, self._judges.ask_unread((), NO_ENGINE), None, NO_ENGINE, threads)
        for part in parts:
            answer.add(part.frame)
        decision = (await answer.check(complete=True)).decision
        if decision.action == "block":
            raise _blocked(decision)
        for part in parts:
            answer.redact(part.frame)


def _hooks(mode: Any) -> set[str] | None:
    """Names of the hooks that LiteLLM calls; None where tags decide it for each request, or nothing does."""
    listed = mode if isinstance(mode, list) else [mode]
    names = {one.value if isinstance(one, GuardrailEventHooks) else one for one in listed}
    return names if all(isinstance(one, str) for one in names) else None


async def _nothing() -> Finding:
    return Finding(None, NO_ENGINE)


@contextmanager
def _told() -> Iterator[None]:
    """Errors as LiteLLM wants them."""
    try:
        yield
    except ApiError as error:
        raise HTTPException(error.status, {"error": str(error)}) from None


def _notes_in(data: dict[str, Any]) -> str:
    """In some APIs ``metadata`` is the client's, and goes to the model server."""
    return "litellm_metadata" if "litellm_metadata" in data else "metadata"


def _note(decision: Decision) -> dict[str, Any]:
    enforced = [hit for hit in decision.hits if hit.mode == "enforce" and hit.action != "allow"]
    return {"action": decision.action, "rules": [hit.rule for hit in enforced], "reason": decision.reason}


def _blocked(decision: Decision) -> HTTPException:
    if decision.by is None:
        return HTTPException(503, {"error": f"rule {decision.rule} lets nothing pass that cannot be measured"})
    return HTTPException(400, {"error": f"{decision.message} (rule {decision.rule})", "code": "content_filter"})
