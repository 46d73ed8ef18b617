"""vLLM's front end, in the API server or offline: specs go in resolved, readouts come out at their request.

Relies on (vLLM 0.29): HfRenderer.{render_messages, render_messages_async}, safe_apply_chat_template,
AsyncLLM.generate, InputProcessor.process_inputs, OutputProcessor.{add_request, process_outputs, request_states},
RequestState.{external_req_id, request_index}, EngineCoreOutput.kv_transfer_params,
TokensInput["prompt_token_offsets"].
What belongs to one request lives in one ``RequestContext``, found through a context variable while the request is
prepared and through its engine state afterwards. Requests without a spec run vLLM's code unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from guard.mia.patching import wrap
from guard.mia.results import (
    AttentionReadout,
    Readout,
    Readouts,
    RowsReadout,
    join_rows,
    rows_from_wire,
    with_token_ids,
)
from guard.mia.spans import LocatedMessage, SpanError, locate_messages, resolve_spec
from guard.mia.spec import MiaSpec, TokenRanges


@dataclass
class PreparedPrompt:
    """One prompt of a request, as handed to the engine: what its readouts are completed with on the way back."""

    index: int
    token_ids: list[int]
    span_tokens: dict[str, tuple[tuple[int, int], ...]]
    unavailable: dict[str, Readout]


@dataclass
class RequestContext:
    """One request's spec, what rendering found, and the readouts as they arrive.

    ``grown``: rows that came so far of captures that go on through the answer, by prompt's request id and choice.
    """

    spec: MiaSpec
    messages: list[LocatedMessage] | SpanError = field(default_factory=lambda: SpanError("the request has no messages"))
    prompts: dict[str, PreparedPrompt] = field(default_factory=dict)
    grown: dict[tuple[str, int], dict[str, list[RowsReadout]]] = field(default_factory=dict)
    pending: list[Readouts] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, readouts: Readouts) -> None:
        self.pending.append(readouts)
        self.arrived.set()

    def take(self) -> list[Readouts]:
        taken, self.pending = self.pending, []
        return taken


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
        raise VLLMValidationError("mia reads and steers prompts of text alone", parameter="mia")
    ids = prompt["prompt_token_ids"]
    resolved = resolve_spec(context.spec, context.messages, prompt.get("prompt_token_offsets"), len(ids))
    spec = resolved.spec
    context.prompts[request_id] = PreparedPrompt(
        index=len(context.prompts),
        token_ids=ids,
        span_tokens={name: span.tokens for name, span in spec.spans.items() if isinstance(span, TokenRanges)},
        unavailable={name: _unavailable(context.spec, name, reason) for name, reason in resolved.unavailable.items()},
    )
    if resolved.unavailable and not (spec.hidden or spec.attention):
        # Nothing is left for the engine to read, so nothing would come back from it.
        context.deliver(_complete(context, request_id, 0, Readouts({}, prompt_tokens=len(ids))))
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), "mia": spec.to_wire()}
    if spec.attention or any(capture.whole_prompt for capture in spec.hidden.values()):
        # Tokens of cached blocks never pass the taps.
        params.skip_reading_prefix_cache = True
    if spec.steer:
        prompt = {**prompt, "cache_salt": steering_salt(spec, prompt.get("cache_salt"))}
    return prompt, params


def _unavailable(spec: MiaSpec, capture: str, reason: str) -> Readout:
    if capture in spec.attention:
        return AttentionReadout("unavailable", spec.attention[capture].heads, reason=reason)
    return RowsReadout("unavailable", spec.hidden[capture].layer, reason=reason)


def steering_salt(spec: MiaSpec, given: str | None) -> str:
    """Cache salt under which only requests that are steered alike share blocks."""
    steer = "|".join(sorted(one.model_dump_json() for one in spec.steer))
    return hashlib.sha256(f"{given or ''}|mia|{steer}".encode()).hexdigest()


def install() -> None:
    """Wrap vLLM's front-end methods. Safe to call once per process, before any engine exists."""
    wrap(HfRenderer, "render_messages", _render_messages)
    wrap(HfRenderer, "render_messages_async", _render_messages_async)
    wrap(AsyncLLM, "generate", _generate)
    wrap(InputProcessor, "process_inputs", _process_inputs)
    wrap(OutputProcessor, "add_request", _add_request)
    wrap(OutputProcessor, "process_outputs", _process_outputs)


def _render_messages(original: Any, renderer: HfRenderer, messages: Any, params: Any) -> Any:
    conversation, prompt = original(renderer, messages, params)
    context = _current.get()
    if context is not None and context.spec.needs_messages:
        context.messages = _locate(renderer, conversation, prompt, params)
    return conversation, prompt


async def _render_messages_async(original: Any, renderer: HfRenderer, messages: Any, params: Any) -> Any:
    conversation, prompt = await original(renderer, messages, params)
    context = _current.get()
    if context is not None and context.spec.needs_messages:
        context.messages = await asyncio.to_thread(_locate, renderer, conversation, prompt, params)
    return conversation, prompt


def _locate(renderer: HfRenderer, conversation: Any, prompt: Any, params: Any) -> list[LocatedMessage] | SpanError:
    text = prompt.get("prompt")
    if not isinstance(text, str):
        return SpanError("the prompt was rendered to tokens without its text")
    kwargs = params.get_apply_chat_template_kwargs()

    def render(messages: list[dict[str, Any]]) -> str:
        conversation: Any = messages
        rendered = safe_apply_chat_template(renderer.model_config, renderer.get_tokenizer(), conversation, **kwargs)
        assert isinstance(rendered, str)
        return rendered

    try:
        return locate_messages(conversation, text, render)
    except SpanError as error:
        return error


def _generate(
    original: Any, engine: AsyncLLM, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
) -> Any:
    if _asks(sampling_params):
        context = _current.get()
        if context is None:
            raise _unseen()
        prompt, sampling_params = prepare(context, prompt, sampling_params, request_id)
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
    if context is not None and state is not None:
        state.mia = context


def _process_outputs(original: Any, processor: OutputProcessor, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    asking = []
    for output in outputs:
        state: Any = processor.request_states.get(output.request_id)
        context: RequestContext | None = getattr(state, "mia", None)
        if context is not None:
            asking.append((output.request_id, state, context))
        if output.kv_transfer_params and "mia" in output.kv_transfer_params:
            wire = output.kv_transfer_params.pop("mia")
            output.kv_transfer_params = output.kv_transfer_params or None
            if context is not None:
                _receive(context, state, wire)
    processed = original(processor, outputs, *args, **kwargs)
    for request_id, state, context in asking:
        if request_id not in processor.request_states:
            _finish(context, state)
    return processed


def _receive(context: RequestContext, state: Any, wire: dict[str, Any]) -> None:
    """What one engine step gave for one choice."""
    request_id, choice = state.external_req_id, state.request_index
    if wire["prompt"] is not None:
        context.deliver(_complete(context, request_id, choice, Readouts.from_wire(wire["prompt"])))
    if wire["grown"]:
        rows = context.grown.setdefault((request_id, choice), {})
        for name, item in wire["grown"].items():
            rows.setdefault(name, []).append(rows_from_wire(item))


def _finish(context: RequestContext, state: Any) -> None:
    """The answer has ended: what grew with it is whole."""
    if any(capture.generates for capture in context.spec.hidden.values()):
        request_id, choice = state.external_req_id, state.request_index
        grown = context.grown.pop((request_id, choice), {})
        items: dict[str, Readout] = {
            name: join_rows(grown[name]) if name in grown else RowsReadout("complete", capture.layer)
            for name, capture in context.spec.hidden.items()
            if capture.generates
        }
        prompt = context.prompts[request_id]
        token_ids = [*prompt.token_ids, *state.detokenizer.output_token_ids]
        items = {name: with_token_ids(item, token_ids) for name, item in items.items()}
        context.deliver(
            Readouts(items, prompt.span_tokens, len(prompt.token_ids), prompt.index, choice_index=choice, stage="final")
        )


def _complete(context: RequestContext, request_id: str, choice_index: int, readouts: Readouts) -> Readouts:
    prompt = context.prompts[request_id]
    return replace(
        readouts,
        items={name: with_token_ids(item, prompt.token_ids) for name, item in readouts.items.items()}
        | prompt.unavailable,
        span_tokens=prompt.span_tokens,
        prompt_index=prompt.index,
        choice_index=choice_index,
    )
