"""``docs/api.md``: the proxy's answers, settings and ledger, written from the code: ``python -m guard.reference``.

Owns the page's frame. Meanings come from where each thing is declared; a test fails when the page is stale.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from guard.proxy.body import MAX_CHOICES, MAX_DEPTH, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, MAX_VALUES
from guard.proxy.embeddings import MAX_PROMPTS, MAX_REPEATED
from guard.proxy.errors import ApiError
from guard.settings import PREFIX, Settings
from guard.telemetry.record import ENTRY_FIELDS

HEAD = """# API of the proxy

Generated from the code by `python -m guard.reference`; do not edit.

| route | |
| --- | --- |
| `POST /v1/chat/completions` | guarded, streamed or not; fields pass to vLLM as they are, but for those below |
| `POST /v1/responses` | the same |
| `POST /v1/completions` | the same by text; detectors that read the prompt in the model are unavailable: below |
| `POST /v1/messages` | the same for Anthropic's clients, where vLLM serves it; errors have `type: error` too |
| `POST /v1/embeddings` | judged by its texts; detectors that read the model are unavailable: `on_error` decides |
| `POST /v1/rerank`, `/rerank`, `/v2/rerank` | with `GUARD_RERANK`: [reranking](use-cases/reranking.md) |
| `GET /v1/models`, `GET /v1/models/ID` | vLLM's list, one entry of it |
| `GET /livez` | 200 while the proxy lives |
| `GET /readyz`, `GET /health` | 200 while a vLLM is healthy too and the proxy is not told to stop, else 503: below |
| `GET /metrics` | Prometheus; [what each series means](metrics.md) |

A raw prompt, of `/v1/completions`, has no template: its client chooses where it ends and what of it is whose, and so
where a detector would read. Those that read the model at the prompt's end, or at messages, are unavailable there and
`on_error` decides, so that a policy with `on_error: block` takes none; those of text and of generated tokens go on. The
text, and `suffix`, counts as a user's and as a tool's result in every `scope`, as it may be either; a `scope` of other
roles alone does not apply. So it is with texts in `input` of `/v1/embeddings`.

`documents`, also in `chat_template_kwargs`, count as results of tools: a `scope` or redaction of these has them in it.
Where in the prompt they are only the template knows, so a detector that reads the model at results of tools is
unavailable; to have them read, send them as messages of role `tool`. What else `chat_template_kwargs` has counts as the
user's; `tools` and formats of answers as the application's, which only detectors without a `scope` read.

Refused, because it would decide where a prompt is measured, or whether: `vllm_xargs.mia`, MIA's own keys in
`vllm_xargs`, `use_beam_search`, `add_generation_prompt: false`, `continue_final_message`, `truncate_prompt_tokens`,
`chat_template`, `return_assistant_tokens_mask`, and the same under `chat_template_kwargs`; there also whatever pads or
cuts the prompt or makes it other tokens (`tokenize`, `padding`, `truncation`, `max_length`, `tokenizer_kwargs` and
others, in `mm_processor_kwargs` too), or stands in the place of what the engine gives a template (`messages`,
`eos_token` and others); `add_special_tokens: true` with messages; `prefix` and `partial` in a message;
`truncation: auto`.

Refused too, because no rule would read it: `enable_response_messages`, `kv_transfer_params` and `ec_transfer_params`.
Where rules judge answers, these leave out `token_ids` in chats, and with `stop` or `stop_token_ids` everywhere;
`logprobs` with `return_tokens_as_token_ids`; and the number that `stop_reason` is with `stop_token_ids`.

Refused too: several prompts in one completion request, `messages` beside `input` in one of `/v1/embeddings`, and
`prompt_embeds`; `background`, `previous_response_id`,
`prompt`, `conversation`, items that refer to others, tools that vLLM calls itself (`mcp`, `web_search_preview`,
`code_interpreter`, `container`) and an unfinished last item in `/v1/responses`, whose prompt or answer is not in the
request. So is what vLLM fails at or reads as somebody else's: items of other types than `message`, `reasoning`,
`function_call` and `function_call_output`, and a `role` in the last three; in `/v1/messages` a `tool_result` in the
assistant's turn, and a message of role `system` that is not the first or stands beside `system`.

A request has at most MAX_MESSAGES messages or items, MAX_PARTS parts of messages, MAX_TOOLS tools, MAX_TOOLS functions,
MAX_CHOICES choices (`n`, `best_of`), and MAX_VALUES texts, fields, lists and objects at any depth, which is MAX_DEPTH
at most; more is a 400.

Of several texts or conversations in one of `/v1/embeddings` each is judged by itself. They are at most MAX_PROMPTS, and
what stands beside them (tools, `chat_template_kwargs`) has at most MAX_REPEATED characters, counted once for each. The
worst decision is the request's: one that is blocked blocks all, and none is embedded by two models. What is redacted is
redacted in those that hit. The ledger has the highest score of each detector, but of those that the decision rests on
the ones that it was made on.

Every other path is a 404, but for those in `GUARD_PASSED_PATHS`, which no policy sees. With API keys configured, all
but the last three rows want `Authorization: Bearer KEY`, or `x-api-key: KEY`.

Of a client's headers vLLM gets `traceparent` and `tracestate`, and of `via` the entries of guards, to which each adds
its own, `1.1 mia-guard-` and 16 digits. Of vLLM's a client gets `content-type`, and `retry-after`
and `retry-after-ms` where they are numbers, or the first a date. No others pass, in either direction.

`/readyz` says `status` (`ok`, `unavailable` or `draining`), `engine`, `engines` (`healthy` and `of`), `providers`
where there are any (`starting`, `ok` or `unavailable`: the process that asks them), `policy` and
`policies_version`, `policies_reload` and `keys_reload` (`failed` while a file cannot be used), `limits` (`local`,
`shared`, or `degraded` while Redis does not count), and `ledger` (`ok`, or `degraded` while entries cannot be written,
which wait in memory; still ready).

A request line and its headers may have 64 KiB together and 128 headers, else 431 and the connection is closed, before
any key is asked for, with no entry in the ledger; two `Host`, `Authorization`, `x-api-key` or `content-type`
headers are a 400, and so are two of one by which `selection.yaml` chooses a policy. Trailers are dropped.

## Streamed answers
When an answer's tokens leave is the policy's `streaming` ([reference](policy-reference.md#the-file)):

| `streaming` | the first byte waits for | later tokens wait for |
| --- | --- | --- |
| `hold` | the verdict on the prompt, and on the whole answer when a rule may act on it | nothing more |
| `window` | the verdict on the prompt | `window_tokens` later tokens of their choice, judged with them |
| `observe` | nothing | nothing |

A block before the first byte is a status, 400. Later the stream ends with `finish_reason: content_filter` for every
choice, the usage if it was asked for, and `[DONE]`; in `/v1/responses` with what ends the open item, and
`response.incomplete` with the items as far as they were said, no unfinished call, and the reason `content_filter`; in
`/v1/messages` with `stop_reason: refusal`. A token that was withheld is nowhere in the answer, and neither are its
logprobs, its part of a tool call or its part of the usage.

The usage of an answer that the guard ends, whole or streamed, has of the answer what was released: chunks, or tokens
where logprobs show them; nothing of a refusal. Its prompt's tokens are those that the readouts tell, or the model
server by that time; 0 where a rule on text ended it before anybody was asked. vLLM is asked to tell them from the first
chunk on where nothing is read inside the model and the client wants a usage; `/v1/responses` has them at the end alone.
Where nobody told them there is no usage: chats and completions leave it out, as they do when a stream breaks off,
`/v1/responses` has `usage: null`, and in `/v1/messages` it has no `input_tokens`, which are 0 only in a whole message.

A missing score under `on_error: block` ends a stream with an error instead. Each choice is judged, and in it every
string that is a value, each by itself: words, reasoning, refusals, names and arguments of tool calls, code, queries,
transcripts, stop words, annotations, and those of fields that the guard does not know. No texts are kinds in one word
(`type`), reasons to end that are known (`finish_reason`), ids that a server made up, bytes in base64, and what names
the answer or repeats the request (`model`, `instructions`). The worst decides for all. Of a stream that is judged
only `data:` and events' names that repeat the data's `type` leave; an answer with the same key twice, or that begins
with a byte order mark, cannot be read and ends in an error.

A stream in which the model server reports an error ends there, with `[DONE]` where its API has that: nothing that comes
after it is passed on. Where rules judge answers, what waits to be judged is dropped, and the error keeps its type, code
and parameter and gets words of the guard's own, since the model server's may quote what the model wrote; so does an
error of status 500 or more in place of a whole answer. Policies that [keep answers](ledger.md) keep these words, as
withheld.

An answer that was redacted keeps the model server's usage, which is what was generated: it is what gets billed, and it
tells how long the text was that was taken out, but nothing that it said.

## Limits of tokens
Limits, and the ledger's `charged`, count what the model server used, not what the client got: a blocked answer, and
each one that was generated again, as a whole. What the model server did not tell is bounded so that not telling is no
way around a limit:

| not told | charged |
| --- | --- |
| tokens of a stream, cut, left, or without a usage | the frames that came; with `stream_interval` as many \
tokens for each, but no more than its bytes |
| tokens of a whole answer that the client left | what it asked for at most, in the field that its API reads \
(of a chat `max_completion_tokens`, else `max_tokens`), but 4,096 for each choice if that is less |
| tokens of a whole answer without a usage | the same, but no more than its bytes |
| of another provider's model, tokens of an answer that came, or of a part of it | of its texts, as of a prompt's |
| tokens of a prompt | of its texts half for each ASCII letter or space, 1 for every other byte; 8 for each \
message; 16,384 for each picture, sound, video or file |

A stream whose usage is asked for (`include_usage`) counts exactly, and so does the prompt of every request that a
policy reads in the model.

Where the model server told none, ledger, console and traces have what was seen: the tokens of a stream whose frames
have one each are as many as frames with a text came, give or take a few
(`test_of_a_stream_that_told_no_usage_the_tokens_that_came_are_told`).

## Admin API
On `GUARD_ADMIN_PORT`, with a key that `guard keys create --admin` made; such a key opens nothing else. Of this process.

| route | |
| --- | --- |
| `GET /admin/v1/policies` | version of all, each policy's name and hash, and why the files do not count, if so |
| `POST /admin/v1/policies/reload` | reads the files now; `result` is `success`, `failure` or `noop` |
| `GET /admin/v1/keys` | each key's id, tenant, policy, limits, requests, tokens and when it was last used; no hash |
| `POST /admin/v1/keys/reload` | reads the file now; `result` is `success` or `failure` |
| `GET /admin/v1/upstreams` | each vLLM: address, whether it is healthy, requests that it has from here |
| `GET /console/` | the [console](console.md), a page for people; its data under `/console/api` |

## Response headers
| header | meaning |
| --- | --- |
| `x-guard-action` | decided so far: `allow`, `flag`, `redact`, `steer`, `retry`, `route` or `block`, the most severe; \
absent when nothing is. `retry` stays when the answer after it is clean, as `route` of stage `output` does |
| `x-guard-rules` | the rules that hit, separated by commas |
| `x-guard-policy` | name of the policy and the first 12 digits of its content's hash; \
absent when none judged: a key that is refused, say, or a body |
| `x-guard-request-id` | the ledger's id, new for each request |
| `x-request-id` | the client's own if it is short and plain, which the ledger notes too; else the ledger's |
| `x-should-retry` | `false` where OpenAI's clients must not send the request again |
| `retry-after`, `retry-after-ms` | with a 429 or 503: when to try again, in seconds and milliseconds |
"""


SETTINGS = """
Of the proxy. An option counts before the environment, that before the file of `--config`, and that before the default.
The file is YAML with these names in lower case without `GUARD_`. Every setting is also an option: `--set name=value`.
"""


LEDGER = """
One JSON object a line, for every request. The last field of a line, `chain`, is its place in the
[chain](ledger.md#the-chain).
"""


def reference() -> str:
    """The whole page."""
    return _head() + "".join(
        f"\n## {title}\n{note}\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n" + "".join(rows)
        for title, note, columns, rows in (
            (
                "Errors of the proxy itself",
                "\nIn OpenAI's shape. vLLM's own errors keep status and body; where rules judge answers, some but "
                "for their [words](#streamed-answers). Reranking is an API of the guard: a fault of vLLM meanwhile, "
                "as when its engine dies, is a 502 `upstream_unavailable` with vLLM's status in its message.\n",
                ("status", "`error.code`", "`error.type`", "outcome in the ledger", "when"),
                list(_errors()),
            ),
            (
                "Settings",
                SETTINGS,
                ("environment variable", "default", "meaning"),
                list(_settings()),
            ),
            ("Ledger", LEDGER, ("field", "meaning"), list(_ledger())),
        )
    )


def _head() -> str:
    limits = {
        "MAX_PROMPTS": MAX_PROMPTS,
        "MAX_REPEATED": MAX_REPEATED,
        "MAX_MESSAGES": MAX_MESSAGES,
        "MAX_PARTS": MAX_PARTS,
        "MAX_TOOLS": MAX_TOOLS,
        "MAX_VALUES": MAX_VALUES,
        "MAX_DEPTH": MAX_DEPTH,
        "MAX_CHOICES": MAX_CHOICES,
    }
    return re.sub(r"MAX_[A-Z]+", lambda name: f"{limits[name[0]]:,}", HEAD)


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
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{default}`" if default not in (None, "") else "none"


def _ledger() -> Iterator[str]:
    for name, meaning in ENTRY_FIELDS.items():
        yield f"| `{name}` | {meaning} |\n"


if __name__ == "__main__":
    print(reference(), end="")
