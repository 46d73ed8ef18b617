"""What of a request inside LiteLLM a model may read: the view that a policy judges, and the way of changed texts back.

Owns which of LiteLLM's fields hold texts, which hold none, and how ``extra_body`` counts. What is in no list may be
read by a model or make LiteLLM ask one otherwise, so it is refused unless it is a number, true or false.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from guard.proxy.body import GuardedRequest, checked
from guard.proxy.embeddings import embeddings_form
from guard.proxy.errors import InvalidRequestError
from guard.proxy.shown_texts import AROUND
from guard.proxy.wire import Fields, Texts
from guard.proxy.wire_choices import chat_form, completions_form
from guard.proxy.wire_messages import messages_form
from guard.proxy.wire_responses import responses_form

FORMS: Mapping[str, Texts] = {
    **dict.fromkeys(("completion", "acompletion"), chat_form),
    **dict.fromkeys(("text_completion", "atext_completion"), completions_form),
    **dict.fromkeys(("responses", "aresponses"), responses_form),
    **dict.fromkeys(("embeddings", "embedding", "aembedding"), embeddings_form),
    **dict.fromkeys(("anthropic_messages", "aanthropic_messages"), messages_form),
}
"""LiteLLM's names of the calls that a policy can judge."""

PROMPTS: Mapping[str, tuple[str, ...]] = {
    chat_form.route: ("messages",),
    completions_form.route: ("prompt",),
    responses_form.route: ("input", "instructions"),
    embeddings_form.route: ("input", "messages"),
    messages_form.route: ("messages", "system"),
}
"""Fields of each API that are its prompt; beside them ``AROUND`` is read in all. A prompt of another API is one that
nobody reads here."""

OWN = frozenset(
    (
        *("metadata", "litellm_metadata", "proxy_server_request", "secret_fields", "litellm_call_id", "user"),
        *("litellm_logging_obj", "litellm_session_id", "litellm_trace_id", "litellm_parent_otel_span", "session_id"),
        *("litellm_disabled_callbacks", "success_callback", "failure_callback", "trace_id", "tags", "guardrails"),
        *("guardrail_config", "policies", "headers", "extra_headers", "provider_specific_header", "organization"),
        *("api_key", "api_base", "base_url", "api_version", "deployment", "custom_llm_provider", "model_info"),
        *("timeout", "request_timeout", "stream_timeout", "client_side_timeout", "cache", "ttl", "mock_response"),
        *("allowed_openai_params", "additional_drop_params", "cache_control_injection_points", "retry_policy"),
        *("allowed_model_region", "router_settings_override", "budget_limits", "_litellm_client_requested_model"),
        *("_router_weights", "client_id", "guardrail_to_apply", "user_api_key_dict", "litellm_trusted_callback_vars"),
    )
)
"""LiteLLM's own: whom it asks, how long it waits, what it logs. No model reads these."""

NO_TEXTS = frozenset(
    (
        *("allowed_token_ids", "anthropic_beta", "audio", "bad_words", "betas", "cache_salt", "context_management"),
        *("embed_dtype", "encoding_format", "endianness", "function_call", "include", "inference_geo"),
        *(
            "logit_bias",
            "logprob_token_ids",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "modalities",
            "model",
            "n",
            "best_of",
        ),
        *("prediction", "prompt_cache_key", "prompt_cache_retention", "reasoning", "reasoning_effort"),
        *("repetition_detection", "request_id", "safety_identifier", "service_tier", "speed", "stop"),
        *("stop_sequences", "stop_token_ids", "stream_options", "structured_outputs", "thinking", "tool_choice"),
        *("truncation", "truncation_side", "verbosity", "vllm_xargs"),
        *("max_completion_tokens", "max_output_tokens", "max_tokens"),
    )
)
"""Fields of vLLM, OpenAI and Anthropic of which no prompt is made: how tokens are chosen, counted and sent. Some have
values that are refused (``guard.proxy.body``)."""

FALLBACKS = (
    *("fallbacks", "context_window_fallbacks", "content_policy_fallbacks", "default_fallbacks"),
    "context_window_fallback_dict",
)
"""Fields that name the models to ask next. LiteLLM takes whole requests there as well."""

SHOWN = ("reasoning_effort",)
"""Of ``NO_TEXTS`` what a chat template may print."""

EXTRA = "extra_body"


@dataclass(frozen=True)
class View:
    """``request``: as the model server gets it, with LiteLLM's own fields left out. ``places``: where each field of it
    stands."""

    request: GuardedRequest[Texts]
    places: Mapping[str, Fields]

    @property
    def prompt(self) -> Fields:
        """The fields that make the prompt."""
        names = ("model", *SHOWN, *_read(self.request.form))
        return {name: self.request.fields[name] for name in names if name in self.request.fields}

    def take(self, changed: GuardedRequest[Texts]) -> None:
        """Puts the texts of ``changed`` where LiteLLM will take them from."""
        for name in _read(self.request.form):
            if name in self.places:
                self.places[name][name] = changed.fields[name]


def view_of(call_type: str, data: Fields, harmless: Collection[str] = ()) -> View:
    """``harmless``: further fields that no model reads. Raises ``InvalidRequestError`` for a request of which nobody
    knows what a model would read."""
    form = FORMS.get(call_type)
    if form is None:
        raise InvalidRequestError(f"calls of the kind {call_type} cannot be guarded")
    places: dict[str, Fields] = {name: data for name in data if name not in OWN and name != EXTRA}
    extra = data.get(EXTRA)
    if not isinstance(extra, dict | None):
        raise InvalidRequestError(f"{EXTRA} must be an object", EXTRA)
    for name in extra or ():
        if name in places:
            # Which of them the model gets depends on the provider.
            raise InvalidRequestError(f"{name} is in {EXTRA} and beside it: give it once", f"{EXTRA}.{name}")
        places[name] = extra or {}
    fields = {name: place[name] for name, place in places.items()}
    known = {*NO_TEXTS, *OWN, *_read(form), *harmless}
    for name, value in fields.items():
        if name in FALLBACKS:
            _check_names(name, value)
        elif name not in known and not isinstance(value, bool | int | float | None):
            raise InvalidRequestError(f"{name} cannot be guarded: a model may read it, and no rule does", name)
    return View(checked(form, fields), places)


def _read(form: Texts) -> tuple[str, ...]:
    return (*PROMPTS[form.route], *AROUND)


def _check_names(name: str, value: Any) -> None:
    """Of models: as a list, or by the model that they are tried after."""
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        if isinstance(entry, dict) and "model" not in entry:
            listed = [one for inner in entry.values() for one in (inner if isinstance(inner, list) else [inner])]
        else:
            listed = [entry["model"] if isinstance(entry, dict) and len(entry) == 1 else entry]
        if not all(isinstance(one, str | None) for one in listed):
            raise InvalidRequestError(f"{name} can be guarded only where it has nothing but models' names", name)
