"""``docs/api.md``: the proxy's answers, settings and ledger, written from the code: ``python -m guard.reference``.

Owns the page's frame. Meanings come from where each thing is declared; a test fails when the page is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from guard.proxy.errors import ApiError
from guard.settings import PREFIX, Settings
from guard.telemetry.record import ENTRY_FIELDS

HEAD = """# API of the proxy

Generated from the code by `python -m guard.reference`; do not edit.

| route | |
| --- | --- |
| `POST /v1/chat/completions` | guarded, streamed or not; fields pass to vLLM as they are, but for those below |
| `POST /v1/completions`, `POST /v1/responses` | the same |
| `POST /v1/messages` | the same for Anthropic's clients, where vLLM serves it; errors have `type: error` too |
| `POST /v1/embeddings` | judged by its text; detectors that read the model are unavailable: `on_error` decides |
| `GET /v1/models`, `GET /v1/models/ID` | vLLM's list, one entry of it |
| `GET /livez` | 200 while the proxy lives |
| `GET /readyz`, `GET /health` | 200 while vLLM is healthy too, else 503; names the policy and the version of all |
| `GET /metrics` | Prometheus; [what each series means](../dashboards/README.md) |

Refused, because it would decide where a prompt is measured, or whether: `vllm_xargs.mia`, MIA's own keys in
`vllm_xargs`, `use_beam_search`, `add_generation_prompt: false`, `continue_final_message`, `truncate_prompt_tokens`,
`chat_template`, and the same under `chat_template_kwargs`.

Refused too: several prompts in one completion request and `prompt_embeds`; `background`, `previous_response_id`,
`prompt`, `conversation` and an unfinished last item in `/v1/responses`, whose prompt or answer is not in the request.

Every other path is a 404, but for those in `GUARD_PASSED_PATHS`, which no policy sees. With API keys configured,
`/v1/*` wants `Authorization: Bearer KEY`.

## Streamed answers
When an answer's tokens leave is the policy's `streaming` ([reference](policy-reference.md#the-file)):

| `streaming` | the first byte waits for | later tokens wait for |
| --- | --- | --- |
| `hold` | the verdict on the prompt, and on the whole answer when a rule may act on it | nothing more |
| `window` | the verdict on the prompt | `window_tokens` later tokens of their choice, judged with them |
| `observe` | nothing | nothing |

A block before the first byte is a status, 400. Later the stream ends with `finish_reason: content_filter` for every
choice, the usage if it was asked for, and `[DONE]`; in `/v1/responses` with `response.incomplete` and the reason
`content_filter`; in `/v1/messages` with `stop_reason: refusal`. Its usage counts what was released: chunks, or tokens
where logprobs show them. A token that was withheld is nowhere in the answer, and neither are its logprobs, its part of
a tool call or its part of the usage. A missing score under `on_error: block` ends a stream with an error instead. Each
choice and each of its fields (words, reasoning, refusal, names and arguments of tool calls) is judged; the worst
decides for all.

## Response headers
| header | meaning |
| --- | --- |
| `x-guard-action` | decided so far: `allow`, `flag`, `redact`, `steer`, `route` or `block`; absent when nothing is |
| `x-guard-rules` | the rules that hit, separated by commas |
| `x-guard-policy` | name of the policy and the first 12 digits of its content's hash |
| `x-request-id`, `x-guard-request-id` | the ledger's id: the client's own if it is short and plain, else a new one |
| `x-should-retry` | `false` where OpenAI's clients must not send the request again |
"""


def reference() -> str:
    """The whole page."""
    return HEAD + "".join(
        f"\n## {title}\n{note}\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n" + "".join(rows)
        for title, note, columns, rows in (
            (
                "Errors of the proxy itself",
                "\nIn OpenAI's shape. vLLM's own errors keep status and body.\n",
                ("status", "`error.code`", "`error.type`", "outcome in the ledger", "when"),
                list(_errors()),
            ),
            (
                "Settings",
                "\nOf the proxy. Command-line options win over the environment.\n",
                ("environment variable", "default", "meaning"),
                list(_settings()),
            ),
            ("Ledger", "\nOne JSON object a line, for every request.\n", ("field", "meaning"), list(_ledger())),
        )
    )


def _errors() -> Iterator[str]:
    meanings = dict(re.findall(r"(\w+Error)\s+\d{3}  (.+)", _module_docstring()))
    for error in sorted(_leaves(ApiError), key=lambda one: (one.status, one.__name__)):
        columns = (str(error.status), f"`{error.code}`", f"`{error.type}`", f"`{error.outcome}`")
        yield f"| {' | '.join(columns)} | {meanings[error.__name__]} |\n"


def _module_docstring() -> str:
    from guard.proxy import errors

    tree = errors.__doc__ or ""
    return re.sub(r"[│├└─]", " ", tree)


def _leaves(error: type[ApiError]) -> Iterator[type[ApiError]]:
    """Errors that are raised: every class below ``error``."""
    for one in error.__subclasses__():
        yield one
        yield from _leaves(one)


def _settings() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        meaning = " ".join((field.description or "").replace("``", "`").split())
        yield f"| `{PREFIX}{name.upper()}` | {_default(name, field)} | {meaning} |\n"


def _default(name: str, field: FieldInfo) -> str:
    shipped = {"policy": "the shipped `default.yaml`", "model_configs": "the shipped folder"}
    if field.default_factory is not None:
        return shipped.get(name, "in the user's state folder")
    return f"`{field.default}`" if field.default not in (None, ()) else "none"


def _ledger() -> Iterator[str]:
    for name, meaning in ENTRY_FIELDS.items():
        yield f"| `{name}` | {meaning} |\n"


if __name__ == "__main__":
    print(reference(), end="")
