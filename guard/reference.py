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
| `GET /v1/models`, `GET /v1/models/ID` | vLLM's list, one entry of it |
| `GET /livez` | 200 while the proxy lives |
| `GET /readyz`, `GET /health` | 200 while vLLM is healthy too, else 503; names the policy and the version of all |
| `GET /metrics` | Prometheus; [what each series means](../dashboards/README.md) |

Refused, because it would decide where a prompt is measured, or whether: `vllm_xargs.mia`, MIA's own keys in
`vllm_xargs`, `use_beam_search`, `add_generation_prompt: false`, `continue_final_message`, `truncate_prompt_tokens`,
`chat_template`, and the same under `chat_template_kwargs`.

Every other path is a 404. With API keys configured, `/v1/*` wants `Authorization: Bearer KEY`.

## Response headers
| header | meaning |
| --- | --- |
| `x-guard-action` | `allow`, `flag`, `steer` or `block`; absent when it did not come to a decision |
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
