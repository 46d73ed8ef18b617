"""vLLM's front end, in the API server or offline: specs go in resolved, readouts come out at their request.

Relies on (vLLM 0.29): HfRenderer.{render_messages, render_messages_async}, safe_apply_chat_template,
BaseRenderer.{tokenize_prompt, tokenize_prompt_async, process_for_engine, process_for_engine_async},
TokenizeParams.return_token_offsets,
AsyncLLM.generate, InputProcessor.process_inputs, OutputProcessor.{add_request, process_outputs, request_states},
RequestState.{external_req_id, request_index, stats}, RequestStateStats.{queued_ts, scheduled_ts},
EngineCoreOutput.kv_transfer_params,
TokensInput["prompt_token_offsets"].
What belongs to one request lives in one ``RequestContext``, found through a context variable while the request is
prepared and through its engine state afterwards. Requests without a spec run vLLM's code unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.renderers.params import TokenizeParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from guard.mia.assembly import Asked, Waiting
from guard.mia.inbox import Inbox
from guard.mia.metrics import engine_metrics
from guard.mia.patching import wrap
from guard.mia.results import Readout, Readouts, Stage, SteeringReport, not_complete, with_token_ids
from guard.mia.spans import LocatedMessage, SpanError, locate_messages, resolve_spec, split_joined
from guard.mia.spec import MiaSpec, TokenRanges, generates
from guard.mia.windows import first_read, first_steered, reach

NO_MESSAGES = "no chat template has rendered messages of this request"

NOT_TEXT = ("multi_modal_data", "prompt_embeds", "encoder_prompt")
"""Keys of a tokenized prompt that is more than its tokens."""

INBOX_ATTRIBUTE = "mia_inbox"
"""Name under which an output processor keeps its inbox, from the first request with a spec on."""


@dataclass
class PreparedPrompt:
    """One prompt of a request, as handed to the engine: what its readouts are completed with on the way back."""

    index: int
    token_ids: list[int]
    span_tokens: dict[str, tuple[tuple[int, int], ...]]
    unavailable: dict[str, Readout]
    asked: Asked


@dataclass(frozen=True)
class EngineFacts:
    """What the front end knows of its engine, asked once: vLLM goes through all installed packages to say which model
    runner it has, which takes 25 ms.

    ``keys_from_cache``: whether the workers read keys from vLLM's cache, so that cached prompts need not be computed
    again. ``hidden_size``: of the model.
    """

    keys_from_cache: bool = False
    hidden_size: int = 0

    @classmethod
    def of(cls, config: VllmConfig) -> EngineFacts:
        cuda = config.device_config.device_type == "cuda"
        return cls(cuda and config.use_v2_model_runner, config.model_config.get_hidden_size())


@dataclass
class RequestContext:
    """One request's spec, what rendering found, and the readouts as they arrive.

    ``vectors``: digests of the engine's steering vectors by name. ``max_grown_bytes``: most that what grows with one
    answer may take; ``max_answer_bytes``: most that an answer over HTTP may hold. ``shows_progress``: whether what
    grows can leave before the answer's end. ``prompts``: by request id.
    """

    spec: MiaSpec
    vectors: dict[str, str] = field(default_factory=dict)
    engine: EngineFacts = field(default_factory=EngineFacts)
    max_grown_bytes: int = 2**63
    max_answer_bytes: int = 2**63
    shows_progress: bool = False
    messages: list[LocatedMessage] | SpanError = field(default_factory=lambda: SpanError(NO_MESSAGES))
    prompts: dict[str, PreparedPrompt] = field(default_factory=dict)
    pending: list[Readouts] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, readouts: Readouts) -> None:
        self.pending.append(readouts)
        self.arrived.set()

    def take(self) -> list[Readouts]:
        taken, self.pending = self.pending, []
        return taken


@dataclass(frozen=True)
class Choice:
    """One answer to one prompt of a request. ``state``: vLLM's."""

    context: RequestContext
    prompt: PreparedPrompt
    state: Any

    @property
    def index(self) -> int:
        return int(self.state.request_index)

    @property
    def token_ids(self) -> list[int]:
        """Of the prompt and of the answer so far."""
        return [*self.prompt.token_ids, *self.state.detokenizer.output_token_ids]


_current: ContextVar[RequestContext | None] = ContextVar("mia_request", default=None)


@contextmanager
def active(context: RequestContext) -> Iterator[None]:
    """Make ``context`` the one that vLLM's calls below belong to."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def prepare(context: RequestContext, prompt: Any, params: Any, request_id: str) -> tuple[Any, Any]:
    """Resolve the spec for one rendered prompt; returns the prompt and sampling parameters for the engine.

    Raises ``VLLMValidationError`` when the spec needs something that this prompt cannot have.
    """
    if not (isinstance(prompt, dict) and prompt.get("type") == "token"):
        raise _not_text()
    ids = prompt["prompt_token_ids"]
    resolved = resolve_spec(context.spec, context.messages, prompt.get("prompt_token_offsets"), len(ids))
    spec = resolved.spec
    for i, steer in enumerate(spec.steer):
        if steer.gate is not None and (reason := resolved.unavailable.get(steer.gate.readout)):
            # Its gate could never open: better no answer than one that is silently not steered.
            raise VLLMValidationError(f"mia.steer.{i}.gate: {reason}", parameter=f"vllm_xargs.mia.steer.{i}.gate")
        if steer.coefficient != 0.0 and not reach(steer, len(ids)):
            where = f"mia.steer.{i}.positions"
            message = f"{where}: of the prompt's {len(ids)} tokens it would steer none"
            raise VLLMValidationError(message, parameter=f"vllm_xargs.{where}")
    context.prompts[request_id] = PreparedPrompt(
        index=len(context.prompts),
        token_ids=ids,
        span_tokens={name: span.tokens for name, span in spec.spans.items() if isinstance(span, TokenRanges)},
        unavailable={
            name: not_complete(context.spec.captures[name], "unavailable", reason)
            for name, reason in resolved.unavailable.items()
        },
        asked=Asked(
            spec,
            len(ids),
            len(ids) + (params.max_tokens or len(ids)),
            context.engine.hidden_size,
            context.max_grown_bytes,
        ),
    )
    if resolved.unavailable and not spec.asks:
        # Nothing is left for the engine to read, so nothing would come back from it.
        prepared = context.prompts[request_id]
        engine_metrics().count_readouts(prepared.unavailable.values())
        context.deliver(_readouts(prepared, prepared.unavailable, ids, 0, "prompt"))
    # Nothing in it is changed, so that nothing in it need be cloned.
    params = copy(params)
    read_from = first_read(spec, len(ids), keys_from_cache=context.engine.keys_from_cache)
    asked = {"spec": spec.to_wire(), "steered_from": first_steered(spec, len(ids)), "read_from": read_from}
    if asked["steered_from"] is not None:
        asked["steering_key"] = steering_key(spec, context.vectors)
    params.extra_args = {**(params.extra_args or {}), "mia": asked}
    if read_from == 0:
        # Tokens of cached blocks never pass the taps. Where some may come from there, ``block_keys`` says how many.
        params.skip_reading_prefix_cache = True
    return prompt, params


def steering_key(spec: MiaSpec, vectors: dict[str, str]) -> str:
    """What tells blocks apart that different steering has touched: the steering, its gates, the vectors' contents."""
    gated = {one.gate.readout: spec.captures[one.gate.readout] for one in spec.steer if one.gate is not None}
    parts = [
        [one.model_dump(mode="json") for one in spec.steer],
        {name: capture.model_dump(mode="json") for name, capture in gated.items()},
        {name: span.model_dump(mode="json") for name, span in spec.spans.items() if isinstance(span, TokenRanges)}
        if gated
        else {},
        {one.vector: vectors.get(one.vector, "") for one in spec.steer},
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def install() -> None:
    """Wrap vLLM's front-end methods. Safe to call once per process, before any engine exists."""
    wrap(HfRenderer, "render_messages", _render_messages)
    wrap(HfRenderer, "render_messages_async", _render_messages_async)
    wrap(BaseRenderer, "tokenize_prompt", _tokenize_prompt)
    wrap(BaseRenderer, "tokenize_prompt_async", _tokenize_prompt_async)
    wrap(BaseRenderer, "process_for_engine", _process_for_engine)
    wrap(BaseRenderer, "process_for_engine_async", _process_for_engine_async)
    wrap(AsyncLLM, "generate", _generate)
    wrap(InputProcessor, "process_inputs", _process_inputs)
    wrap(OutputProcessor, "add_request", _add_request)
    wrap(OutputProcessor, "process_outputs", _process_outputs)


def _render_messages(original: Any, renderer: HfRenderer, messages: Any, params: Any) -> Any:
    conversation, prompt = original(renderer, messages, params)
    context = _current.get()
    if context is not None and context.spec.needs_messages:
        context.messages = _locate(renderer, messages, conversation, prompt, params)
    return conversation, prompt


async def _render_messages_async(original: Any, renderer: HfRenderer, messages: Any, params: Any) -> Any:
    conversation, prompt = await original(renderer, messages, params)
    context = _current.get()
    if context is not None and context.spec.needs_messages:
        context.messages = await asyncio.to_thread(_locate, renderer, messages, conversation, prompt, params)
    return conversation, prompt


def _tokenize_prompt(original: Any, renderer: BaseRenderer, prompt: Any, params: Any) -> Any:
    return original(renderer, prompt, _with_offsets(params))


async def _tokenize_prompt_async(original: Any, renderer: BaseRenderer, prompt: Any, params: Any) -> Any:
    return await original(renderer, prompt, _with_offsets(params))


def _with_offsets(params: TokenizeParams) -> TokenizeParams:
    """Where a spec names messages, where their characters went: whichever route asks, as only some requests have a
    field for it."""
    context = _current.get()
    if context is None or not context.spec.needs_messages:
        return params
    return replace(params, return_token_offsets=True)


def _locate(
    renderer: HfRenderer, sent: Any, conversation: Any, prompt: Any, params: Any
) -> list[LocatedMessage] | SpanError:
    text = prompt.get("prompt")
    if not isinstance(text, str):
        return SpanError("the prompt was rendered to tokens without its text")
    kwargs = params.get_apply_chat_template_kwargs()

    def render(messages: list[dict[str, Any]]) -> str:
        conversation: Any = messages
        try:
            rendered = safe_apply_chat_template(renderer.model_config, renderer.get_tokenizer(), conversation, **kwargs)
        except ValueError as error:
            raise SpanError("the chat template takes these messages only with their own texts") from error
        assert isinstance(rendered, str)
        return rendered

    try:
        located = locate_messages(conversation, text, render)
    except SpanError as error:
        return error
    if len(sent) != len(conversation):
        return located
    return [
        split_joined(one, _first_shown(one, text), was["content"], now["content"])
        if was.get("content") is not None
        else one
        for one, was, now in zip(located, sent, conversation, strict=True)
    ]


def _first_shown(message: LocatedMessage, prompt: str) -> str:
    """The text of a message's first part in the prompt."""
    first = message.parts[0] if message.parts else None
    return prompt[slice(*first)] if isinstance(first, tuple) else ""


def _process_for_engine(original: Any, renderer: BaseRenderer, prompt: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_what_is_not_text(prompt)
    return original(renderer, prompt, *args, **kwargs)


async def _process_for_engine_async(
    original: Any, renderer: BaseRenderer, prompt: Any, *args: Any, **kwargs: Any
) -> Any:
    _refuse_what_is_not_text(prompt)
    return await original(renderer, prompt, *args, **kwargs)


def _refuse_what_is_not_text(prompt: Any) -> None:
    """Before vLLM looks at images: once it has, its cache believes that the engine has them too, and fails whoever
    sends the same image next."""
    context = _current.get()
    if context is not None and context.spec.asks and any(prompt.get(key) is not None for key in NOT_TEXT):
        raise _not_text()


def _not_text() -> VLLMValidationError:
    return VLLMValidationError("mia reads and steers prompts of text alone", parameter="vllm_xargs.mia")


def _generate(
    original: Any, engine: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
) -> Any:
    if _asks(sampling_params):
        context = _current.get()
        if context is None:
            raise _unseen()
        try:
            prompt, sampling_params = prepare(context, prompt, sampling_params, request_id)
        except VLLMValidationError:
            engine_metrics().refused_specs.inc()
            raise
    return original(engine, prompt, sampling_params, request_id, *args, **kwargs)


def _process_inputs(
    original: Any, processor: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """The last gate: whatever way a spec came, the engine gets it only checked and resolved."""
    if _asks(params):
        context = _current.get()
        if context is None or request_id not in context.prompts:
            raise _unseen()
    return original(processor, request_id, prompt, params, *args, **kwargs)


def _asks(params: Any) -> bool:
    return "mia" in (getattr(params, "extra_args", None) or {})


def _unseen() -> VLLMValidationError:
    return VLLMValidationError(
        "a mia spec reached the engine unchecked: over HTTP start vLLM with --middleware "
        "guard.mia.server.MiaMiddleware and send vllm_xargs.mia under its plain name; offline use MiaLLM",
        parameter="vllm_xargs.mia",
    )


def _add_request(original: Any, processor: OutputProcessor, request: Any, *args: Any, **kwargs: Any) -> Any:
    original(processor, request, *args, **kwargs)
    context = _current.get()
    state: Any = processor.request_states.get(request.request_id)
    asking = context is not None and state is not None
    engine_metrics().count_request(context.spec if context is not None and asking else None)
    if context is not None and asking:
        inbox = processor.__dict__.setdefault(INBOX_ATTRIBUTE, Inbox())
        prompt = context.prompts[state.external_req_id]
        inbox.add(request.request_id, Waiting(prompt.asked, Choice(context, prompt, state)))


def _process_outputs(original: Any, processor: OutputProcessor, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    inbox: Inbox | None = processor.__dict__.get(INBOX_ATTRIBUTE)
    if inbox is None or not inbox.waiting:
        return original(processor, outputs, *args, **kwargs)
    read: list[Choice] = []
    for output in outputs:
        if output.kv_transfer_params and "mia" in output.kv_transfer_params:
            inbox.receive(output.kv_transfer_params.pop("mia"))
            output.kv_transfer_params = output.kv_transfer_params or None
        if inbox.has_news and (waiting := inbox.waiting.get(output.request_id)) is not None:
            choice: Choice = waiting.destination
            if (items := inbox.prompt(output.request_id)) is not None:
                prompt = choice.prompt
                items |= prompt.unavailable
                read.append(choice)
                _measure(items, inbox, "prompt")
                choice.context.deliver(_readouts(prompt, items, prompt.token_ids, choice.index, "prompt"))
            if not output.finished and choice.context.shows_progress:
                _show_progress(choice, inbox.progress(output.request_id))
    alive = len(processor.request_states)
    processed = original(processor, outputs, *args, **kwargs)
    for choice in read:
        # vLLM has taken the times over by now, if it keeps any.
        if (stats := choice.state.stats) is not None:
            engine_metrics().queue_wait.observe(max(0.0, stats.scheduled_ts - stats.queued_ts))
    for output in outputs if len(processor.request_states) < alive else ():
        if output.request_id in inbox.waiting and output.request_id not in processor.request_states:
            choice = inbox.waiting[output.request_id].destination
            items, steering = inbox.end(output.request_id)
            _measure(items, inbox, "final")
            engine_metrics().count_steering(choice.context.spec, steering)
            _finish(choice, items, steering)
    if len(inbox.waiting) > len(processor.request_states):
        # Requests whose client has left end without an output.
        inbox.forget(list(inbox.waiting.keys() - processor.request_states.keys()))
    return processed


def _measure(items: dict[str, Readout], inbox: Inbox, stage: Stage) -> None:
    """Readouts have been put together, if there are any."""
    metrics = engine_metrics()
    metrics.count_readouts(items.values())
    if items:
        metrics.courier_lag.labels(stage).observe(max(0.0, time.time() - inbox.step_ended_at_s))


def _show_progress(choice: Choice, items: dict[str, Readout] | None) -> None:
    """Rows that have come of an answer that goes on."""
    if items:
        choice.context.deliver(_readouts(choice.prompt, items, choice.token_ids, choice.index, "progress"))


def _finish(choice: Choice, items: dict[str, Readout], steering: tuple[SteeringReport, ...]) -> None:
    """The answer has ended: what grew with it is whole."""
    spec = choice.context.spec
    if spec.steer or any(generates(capture) for capture in spec.captures.values()):
        choice.context.deliver(_readouts(choice.prompt, items, choice.token_ids, choice.index, "final", steering))


def _readouts(
    prompt: PreparedPrompt,
    items: dict[str, Readout],
    token_ids: list[int],
    choice_index: int,
    stage: Stage,
    steering: tuple[SteeringReport, ...] = (),
) -> Readouts:
    """One choice's readouts with the tokens that they are of. token_ids: those of the prompt, and of the answer."""
    return Readouts(
        {name: with_token_ids(item, token_ids) for name, item in items.items()},
        prompt.span_tokens,
        len(prompt.token_ids),
        prompt.index,
        choice_index,
        stage,
        steering,
    )
