"""Spans through chat templates of the shapes that models ship, by vLLM's own front end: exact, or the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guard.mia.engine_config import EngineConfig
from guard.mia.llm import MiaLLM
from guard.mia.spec import MiaSpec
from tests.engine import engines, oracle
from tests.engine.chat_templates import (
    COUNTS,
    CUTS,
    DEEPSEEK,
    DROPS_SYSTEM,
    GEMMA,
    GEMMA_3,
    LLAMA_3_1,
    MISTRAL,
    PHI_4,
    QWEN_2_5,
    QWEN_3,
    REPEATS_SYSTEM,
    SHOUTS_SYSTEM,
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web for a text",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call12345", "type": "function", "function": {"name": "search", "arguments": '{"query": "sky"}'}}
SYSTEM, QUESTION, FOUND = "Answer briefly.", "Why is the sky blue?", 'It says: "Rayleigh\nscattering", 100 % sure.'
AGENT = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": FOUND, "tool_call_id": "call12345"},
    {"role": "assistant", "content": "Scattering."},
    {"role": "user", "content": "  Thank you! \n"},
]
TURNS = [message for message in AGENT if message["role"] != "tool" and "tool_calls" not in message]
TURNS.insert(2, {"role": "assistant", "content": "A moment."})


@dataclass(frozen=True)
class Rendered:
    """``spans``: the text under each one's tokens. ``missing``: why a span has none."""

    prompt: str
    spans: dict[str, str]
    missing: dict[str, str]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MiaLLM]:
    folder: Path = oracle.save("llama", tmp_path_factory.mktemp("tiny-llama"))
    with engines.engine(folder, EngineConfig(attention_heads=((1, 0),)), max_model_len=2048) as llm:
        yield llm


def render(llm: MiaLLM, template: str, messages: list[dict[str, Any]], *selectors: str, tools: Any = None) -> Rendered:
    """What a request with one span for each selector is told about them, before the engine sees it."""
    from vllm import SamplingParams
    from vllm.renderers.params import ChatParams

    from guard.mia.frontend import RequestContext, active, prepare

    names = {f"s{i}": selector for i, selector in enumerate(selectors)}
    captures = {name: {"heads": [[1, 0]], "spans": [name]} for name in names}
    context = RequestContext(MiaSpec.model_validate({"spans": names, "attention": captures}))
    chat = {"add_generation_prompt": True, "tokenize": False, "tools": tools}
    renderer = llm.llm.renderer
    offsets = replace(renderer.default_chat_tok_params, return_token_offsets=True)
    with active(context):
        params = ChatParams(chat_template=template.strip("\n"), chat_template_kwargs=chat)
        _, (prompt,) = renderer.render_chat([messages], params, offsets)
        prepare(context, prompt, SamplingParams(max_tokens=1), "request")
    (prepared,) = context.prompts.values()
    spans = {}
    for name, ranges in prepared.span_tokens.items():
        ids = [id_ for start, end in ranges for id_ in prepared.token_ids[start:end]]
        spans[names[name]] = llm.tokenizer.decode(ids)
    missing = {names[name]: readout.reason for name, readout in prepared.unavailable.items()}
    assert set(missing) == set(selectors) - spans.keys()
    return Rendered(prompt["prompt"], spans, missing)


ALL = ("system", "user.first", "user.last", "tool", "message.4")
EXACT = {
    "system": SYSTEM,
    "user.first": QUESTION,
    "user.last": "  Thank you! \n",
    "tool": FOUND,
    "message.4": "Scattering.",
}
IN_JSON = FOUND.replace('"', '\\"').replace("\n", "\\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN_2_5, EXACT),
        (QWEN_3, EXACT),
        (LLAMA_3_1, {**EXACT, "user.last": "Thank you!", "tool": IN_JSON}),
        (MISTRAL, EXACT),
        (DEEPSEEK, EXACT),
    ],
    ids=["qwen2.5", "qwen3", "llama3.1", "mistral", "deepseek"],
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without-tools", "with-tools"])
def test_an_agents_turns_are_found_exactly(llm: MiaLLM, template: str, expected: dict[str, str], tools: Any) -> None:
    rendered = render(llm, template, AGENT, *ALL, tools=tools)
    assert rendered.missing == {}
    assert rendered.spans == expected
    if tools:
        assert ("Search the web" in rendered.prompt) == (template is not DEEPSEEK)


@pytest.mark.parametrize("template", [GEMMA_3, PHI_4], ids=["gemma3", "phi4"])
def test_turns_of_templates_without_tools_are_found_exactly(llm: MiaLLM, template: str) -> None:
    rendered = render(llm, template, [*TURNS[:2], *TURNS[3:]], "system", "user.first", "user.last", "assistant")
    last = "Thank you!" if template is GEMMA_3 else "  Thank you! \n"
    assert rendered.spans == {
        "system": SYSTEM,
        "user.first": QUESTION,
        "user.last": last,
        "assistant": "Scattering.",
    }


def test_parts_of_a_content_are_found_whatever_the_template_takes(llm: MiaLLM) -> None:
    content = [{"type": "text", "text": "Summarise this:"}, {"type": "text", "text": "Sky is blue."}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    for template in (GEMMA_3, QWEN_2_5, LLAMA_3_1):
        rendered = render(llm, template, messages, "user.part.0", "user.last.part.-1", "system")
        assert rendered.spans == {
            "user.part.0": "Summarise this:",
            "user.last.part.-1": "Sky is blue.",
            "system": SYSTEM,
        }


def test_a_template_that_takes_no_system_message_refuses_the_request(llm: MiaLLM) -> None:
    with pytest.raises(ValueError, match="System role not supported"):
        render(llm, GEMMA, TURNS[:2], "system")
    assert render(llm, GEMMA, TURNS[1:2], "user").spans == {"user": QUESTION}


def test_a_default_system_text_is_no_message(llm: MiaLLM) -> None:
    rendered = render(llm, QWEN_2_5, AGENT[1:], "system", "user.first")
    assert "You are Qwen." in rendered.prompt
    assert rendered.spans == {"user.first": QUESTION}
    assert "no message's text in the prompt matches system" in rendered.missing["system"]


@pytest.mark.parametrize("template", [QWEN_3, DEEPSEEK], ids=["qwen3", "deepseek"])
def test_an_answer_whose_thoughts_are_taken_out_costs_its_own_span_alone(llm: MiaLLM, template: str) -> None:
    thoughts = [*AGENT]
    thoughts[4] = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nScattering."}
    rendered = render(llm, template, thoughts, *ALL, "assistant")
    assert rendered.spans == {name: text for name, text in EXACT.items() if name != "message.4"}
    assert "rewrites this message's text" in rendered.missing["message.4"]
    assert "rewrites this message's text" in rendered.missing["assistant"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (DROPS_SYSTEM, "no message's text in the prompt matches system"),
        (SHOUTS_SYSTEM, "drops or rewrites this message's text"),
        (REPEATS_SYSTEM, "shows this message more than once"),
        (CUTS, "drops or rewrites this message's text"),
        (COUNTS, "depends on the messages' texts"),
    ],
    ids=["drops", "shouts", "repeats", "cuts", "counts"],
)
def test_a_system_message_that_is_not_shown_as_it_is_has_no_span_and_a_reason(
    llm: MiaLLM, template: str, reason: str
) -> None:
    short = [TURNS[0], {"role": "user", "content": "Why?"}]
    rendered = render(llm, template, short, "system", "user", "message.0")
    assert reason in rendered.missing["system"]
    assert "message.0" in rendered.missing
    # What these two do, they do to every text.
    assert rendered.spans == ({} if template in (COUNTS, CUTS) else {"user": "Why?"})


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00"), max_size=12)
SHAPES = {
    "as-is": "message.content",
    "trimmed": "message.content | trim",
    "json": "message.content | tojson",
    "shouted": "message.content | upper",
    "dropped": "''",
    "twice": "message.content + '|' + message.content",
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(st.sampled_from(sorted(SHAPES)), TEXTS), min_size=1, max_size=5))
def test_a_span_is_its_message_as_shown_or_says_why_not(llm: MiaLLM, turns: list[tuple[str, str]]) -> None:
    """Every message is shown in a way of its own; what others do to theirs changes nothing."""
    branches = [
        f"{{%- {'if' if i == 0 else 'elif'} loop.index0 == {i} %}}{{{{ '[{i}]' + ({SHAPES[shape]}) }}}}"
        for i, (shape, _) in enumerate(turns)
    ]
    template = f"{{%- for message in messages %}}{''.join(branches)}{{%- endif %}}{{%- endfor %}}{{{{- '[end]' }}}}"
    messages = [{"role": "user", "content": text} for _, text in turns]
    selectors = [f"message.{i}" for i in range(len(turns))]
    rendered = render(llm, template, messages, *selectors)
    for selector, (shape, text) in zip(selectors, turns, strict=True):
        if selector in rendered.spans:
            # What is shown differs from the text by white space around it and by escapes of JSON, and not in letters.
            assert shape not in ("dropped", "twice")
            shown = rendered.spans[selector]
            allowed = {"as-is": text, "trimmed": text.strip(), "json": None, "shouted": text.upper()}[shape]
            assert shown == allowed if allowed is not None else _json(shown) == text
        else:
            hidden = shape in ("dropped", "twice", "shouted") or not text.strip()
            assert hidden, (selector, rendered.missing)


def _json(inside: str) -> Any:
    return json.loads(f'"{inside}"')
