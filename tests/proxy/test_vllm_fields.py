"""Every field of vLLM's own request models is one that somebody looked at: a new one, in a new vLLM, fails here until
it is known what it makes the engine read or show."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from guard.proxy.body import REPLACING, TOKENIZING, UNGUARDED, UNMEASURABLE
from guard.proxy.shown_texts import AROUND
from guard.proxy.wire_responses import ELSEWHERE

JUDGED = {"messages", "prompt", "input", "system", "instructions", *AROUND}
"""Texts that the model may read: rules read them too."""

REFUSED = {*UNMEASURABLE, *UNGUARDED, *ELSEWHERE, "background", "prompt_embeds", "add_special_tokens"}
"""Refused, but for the values that change nothing; ``add_special_tokens`` where there are messages."""

SHOWN = {
    *("echo", "include", "include_reasoning", "include_stop_str_in_output", "logprobs", "top_logprobs"),
    *("logprob_token_ids", "prompt_logprobs", "return_prompt_text", "routed_experts_prompt_start", "metadata"),
    *("skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_sequences"),
}
"""Of what these bring into an answer every text is read there."""

TAKEN_OUT = {"return_token_ids", "return_tokens_as_token_ids", "stop_token_ids"}
"""What these bring is no text, and leaves only where it says no more than the text does."""

RENDERED = {"return_token_offsets"}
"""Of endpoints that the guard does not serve."""

HARMLESS = {
    *("allowed_token_ids", "bad_words", "cache_salt", "dimensions", "embed_dtype", "endianness"),
    *("encoding_format", "frequency_penalty", "ignore_eos", "length_penalty", "logit_bias", "max_completion_tokens"),
    *("max_output_tokens", "max_tokens", "max_tool_calls", "media_io_kwargs", "min_p", "min_tokens"),
    *("mm_processor_kwargs", "model", "n", "padding", "parallel_tool_calls", "presence_penalty", "priority"),
    *("prompt_cache_key", "reasoning", "reasoning_effort", "repetition_detection", "repetition_penalty", "request_id"),
    *("seed", "service_tier", "session_id", "store", "stream", "stream_interval", "stream_options"),
    *("structured_outputs", "temperature", "thinking_token_budget", "tool_choice", "top_k", "top_p"),
    *("truncation_side", "use_activation", "user", "vllm_xargs"),
}
"""How tokens are chosen, counted and sent: nothing is read or shown for them that is not elsewhere."""

MODELS = {
    "openai/chat_completion/protocol.py": ("ChatCompletionRequest",),
    "openai/completion/protocol.py": ("CompletionRequest",),
    "openai/responses/protocol.py": ("ResponsesRequest",),
    "anthropic/protocol.py": ("AnthropicMessagesRequest",),
    "pooling/embed/protocol.py": (
        "EmbeddingCompletionRequest", "EmbeddingChatRequest", "EmbeddingBatchChatRequest", "EmbeddingChatInputRequest",
        "EmbeddingBatchChatInputRequest",
    ),
    "pooling/base/protocol.py": (
        "PoolingBasicRequestMixin", "CompletionRequestMixin", "ChatRequestOptionsMixin", "ChatRequestMixin",
        "EncodingRequestMixin", "EmbedRequestMixin",
    ),
}  # fmt: skip


def fields_of(path: str, name: str) -> set[str]:
    """As the source says them: importing all of vLLM takes half a minute."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "entrypoints" / path).read_text())
    (model,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
    found = {one.target.id for one in model.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return {one for one in found if not one.startswith("_") and one not in ("model_config", "field_names")}


@pytest.mark.parametrize("path", list(MODELS))
def test_every_field_of_vllms_requests_is_judged_refused_or_known_to_be_harmless(path: str) -> None:
    fields = set().union(*(fields_of(path, name) for name in MODELS[path]))
    assert fields
    assert not fields - JUDGED - REFUSED - SHOWN - TAKEN_OUT - RENDERED - HARMLESS


SHOWN_BY_TEMPLATES = {"tools", "documents", "reasoning_effort"}
"""Arguments of ``apply_chat_template`` that are text: rules read all of ``chat_template_kwargs``."""

TEMPLATES = {
    "transformers": ("tokenization_utils_base.py", "processing_utils.py", "tokenization_mistral_common.py"),
    "vllm": ("tokenizers/*.py", "renderers/hf.py"),
}


def arguments_of_templates(package: str) -> set[str]:
    """The names of all arguments of ``apply_chat_template``, in whatever class has one, and of vLLM's way to it."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    found: set[str] = set()
    for pattern in TEMPLATES[package]:
        for path in Path(spec.origin).parent.glob(pattern):
            for one in ast.walk(ast.parse(path.read_text())):
                if isinstance(one, ast.FunctionDef) and one.name in ("apply_chat_template", "safe_apply_chat_template"):
                    found |= {name.arg for name in (*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs)} - {
                        "self"
                    }
    return found


@pytest.mark.parametrize("package", list(TEMPLATES))
def test_every_argument_of_apply_chat_template_is_read_or_refused(package: str) -> None:
    found = arguments_of_templates(package)
    assert {"tokenize", "tools"} <= found
    assert not found - {*UNMEASURABLE, *TOKENIZING, *REPLACING} - SHOWN_BY_TEMPLATES


def test_no_field_is_in_two_minds() -> None:
    kinds = (JUDGED - REFUSED, REFUSED, SHOWN, TAKEN_OUT, RENDERED, HARMLESS)
    assert sum(map(len, kinds)) == len(set().union(*kinds))
