"""Reranking, in the shape that Jina and Cohere have made common: the model's own attention orders documents by a query.

Owns this API's bodies, its stages and its answer. Nothing is generated but one token that is thrown away, so only text
is judged: the query as what a user says, each document as what comes from outside (role ``tool``), all together and
each by itself, since many clean documents do not make up for one that is not. Detectors that read the model are
calibrated on conversations; they are unavailable here, never clean: ``on_error`` decides.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from guard.blank_text import mistake_in
from guard.mia.results import Readouts
from guard.policy import Decision
from guard.policy.judged_paths import RERANK
from guard.policy.measuring import Unplaced
from guard.proxy.answer import Whole
from guard.proxy.body import GuardedRequest
from guard.proxy.errors import (
    InvalidRequestError,
    RedactionError,
    RoutingError,
    SteeringError,
    UpstreamError,
)
from guard.proxy.exchange import JSON, Exchange
from guard.proxy.judged import relay_failed
from guard.proxy.readouts import Finding
from guard.proxy.recording import Handler
from guard.proxy.replicas import affinity_of
from guard.proxy.services import Services
from guard.proxy.text_judged import STEERS, judged_by_texts
from guard.proxy.usage import expect_nothing
from guard.proxy.verdict import spec_refusal_of
from guard.proxy.wire import Fields, Slot, Texts
from guard.proxy.wire_choices import chat_form
from guard.uses.parts import UnreadableError
from guard.uses.rerank import (
    MAX_DOCUMENTS,
    NO_QUERY,
    Ranked,
    RerankerConfig,
    document_scores,
    prompt,
    rank,
    spec_for,
    token_attention,
)

UNREAD = Unplaced("detectors of conversations do not read a prompt of the reranker")
NOT_READ = Finding(None, UNREAD.whole)
FIELDS = frozenset({"model", "query", "documents", "top_n", "return_documents", "user", "stream"})
ID_SUFFIXES = ("-query", "-blank")
"""Behind the request's id, so that vLLM's log tells the two prompts apart."""

BUSY = 503
"""The model server asks to come back later, and says when."""

COHERE = "/v2/rerank"
"""The path whose answer has Cohere's ``meta`` beside Jina's ``usage``."""


def _check(fields: Fields) -> None:
    # A field that is left out without a word could be one that was to change the order.
    if unknown := sorted(fields.keys() - FIELDS):
        raise InvalidRequestError(
            f"{unknown[0]} is no field of this API; it has {', '.join(sorted(FIELDS))}", unknown[0]
        )
    _check_text(fields.get("query"), "query")
    documents = fields.get("documents")
    if not isinstance(documents, list) or not 1 <= len(documents) <= MAX_DOCUMENTS:
        raise InvalidRequestError(f"documents must be a list of 1 to {MAX_DOCUMENTS} texts", "documents")
    for i, document in enumerate(documents):
        if isinstance(document, dict) and document.keys() != {"text"}:
            raise InvalidRequestError(f"documents[{i}] must be a text, or an object with text alone", f"documents[{i}]")
        _check_text(document["text"] if isinstance(document, dict) else document, f"documents[{i}]")
    top_n = fields.get("top_n")
    if isinstance(top_n, bool) or not (top_n is None or (isinstance(top_n, int) and top_n >= 1)):
        raise InvalidRequestError("top_n must be a whole number from 1 on", "top_n")
    if not isinstance(fields.get("return_documents"), bool | None):
        raise InvalidRequestError("return_documents must be true or false", "return_documents")
    if fields.get("stream"):
        raise InvalidRequestError("an order of documents is not streamed", "stream")


def _check_text(text: Any, where: str) -> None:
    mistake = mistake_in(text) if isinstance(text, str) else "must be a text"
    if mistake is not None:
        raise InvalidRequestError(f"{where} {mistake}", where)


def _slots(fields: Fields) -> list[Slot]:
    documents = fields["documents"]
    places = [(one, "text") if isinstance(one, dict) else (documents, i) for i, one in enumerate(documents)]
    return [Slot(0, 0, fields, "query"), *(Slot(i, 0, owner, key) for i, (owner, key) in enumerate(places, start=1))]


rerank_form = Texts(
    route=RERANK[0],
    check=_check,
    roles=lambda fields: ("user", *("tool" for _ in fields["documents"])),
    slots=_slots,
    beside=lambda fields: [],
    unread=lambda fields: "",
    unplaced=lambda fields: UNREAD,
)


text_form = Texts(
    route=RERANK[0],
    check=lambda fields: None,
    roles=lambda fields: (fields["role"],),
    slots=lambda fields: [Slot(0, 0, fields, "text")],
    beside=lambda fields: [],
    unread=lambda fields: "",
    unplaced=lambda fields: UNREAD,
)
"""One text of such a request, with its role."""


def _prompts_of(request: GuardedRequest[Texts]) -> list[GuardedRequest[Texts]]:
    """The request, and each text of it as one of its own."""
    texts = zip(request.roles, request.form.slots(request.fields), strict=True)
    alone = [{"model": request.model, "role": role, "text": slot.text} for role, slot in texts]
    return [request, *(GuardedRequest(text_form, fields) for fields in alone)]


def reranking(config: RerankerConfig, path: str) -> Handler:
    """The handler of one path. It raises ``ApiError`` or ``ClientGoneError`` for every end but an answer."""

    async def handle(services: Services, exchange: Exchange) -> None:
        def prompts_of(request: GuardedRequest[Texts]) -> list[GuardedRequest[Texts]]:
            if reason := services.unread(request.model):
                raise InvalidRequestError(f"this model cannot rerank: {reason}", "model")
            return _prompts_of(request)

        request, _, decisions = await judged_by_texts(services, exchange, rerank_form, prompts_of, NOT_READ)
        for decision in decisions:
            _check_changes_nothing(decision)
        await exchange.until_client_leaves(_rerank(services, exchange, request, config, path))

    return handle


def _check_changes_nothing(decision: Decision) -> None:
    """Raises ``ApiError`` for what cannot be done to texts that are to be ordered."""
    if decision.action in STEERS:
        raise SteeringError(f"rule {decision.rule} steers, which an order of documents cannot be")
    if decision.action == "route":
        raise RoutingError(f"rule {decision.rule} routes to a model whose heads the reranker does not know")
    if decision.action == "redact":
        raise RedactionError(f"rule {decision.rule} redacts, which leaves texts that have no order")


async def _rerank(
    services: Services, exchange: Exchange, request: GuardedRequest[Texts], config: RerankerConfig, path: str
) -> None:
    record, fields = exchange.record, request.fields
    sent_s = time.perf_counter()
    documents = [one["text"] if isinstance(one, dict) else one for one in fields["documents"]]
    exchange.sent, exchange.sent_times = request, len(ID_SUFFIXES)
    try:
        wholes = await _ask(services, exchange, request.model, config, (fields["query"], NO_QUERY), documents)
    finally:
        record.upstream_s = time.perf_counter() - sent_s
    for whole in wholes:
        if whole.status != 200:
            if refusal := spec_refusal_of(whole):
                raise UpstreamError(f"the model server cannot read the reranker's heads: {refusal}")
            if whole.status >= 500 and whole.status != BUSY:
                # An answer to a prompt of ours, whose words are no answer of this API and may quote the documents.
                expect_nothing(record)
                raise UpstreamError(f"the model server failed ({whole.status}) while it read query and documents")
            return await relay_failed(exchange, whole, begun=False)
    tokens = [_usage(whole) for whole in wholes]
    record.prompt_tokens, record.completion_tokens = (sum(column) for column in zip(*tokens, strict=True))
    record.complete = True
    try:
        asked, blank = (token_attention(_prompt_readouts(whole), len(documents)) for whole in wholes)
        ranked = rank(document_scores(asked, blank), len(config.heads))
    except UnreadableError as error:
        raise UpstreamError(f"the documents cannot be ranked: {error}") from None
    record.outcome = "completed"
    answer = _answer(exchange, request, ranked, documents, path)
    await exchange.respond(200, JSON, json.dumps(answer).encode())


async def _ask(
    services: Services,
    exchange: Exchange,
    model: str,
    config: RerankerConfig,
    queries: Sequence[str],
    documents: Sequence[str],
) -> list[Whole]:
    """vLLM's answers to a prompt with each of the queries; both are in one batch."""
    spec = spec_for(config.heads, len(documents)).to_wire()
    async with AsyncExitStack() as stack:
        openings = []
        for query, suffix in zip(queries, ID_SUFFIXES, strict=True):
            body = {
                "model": model,
                "messages": prompt(query, documents),
                "max_tokens": 1,
                "temperature": 0,
                "vllm_xargs": {"mia": spec},
            }
            raw = json.dumps(body, separators=(",", ":")).encode("utf-8", "backslashreplace")
            sent = services.upstream.ask(
                chat_form.route,
                raw,
                exchange.record.request_id + suffix,
                exchange.passed,
                early=False,
                affinity=affinity_of({"model": model, "prompt": documents[0]}),
            )
            openings.append(await stack.enter_async_context(sent))
        answers = await asyncio.gather(*openings)
        # Asked for whole answers, vLLM sends no stream.
        return [await answer.whole() for answer in answers]  # type: ignore[union-attr]


def _usage(whole: Whole) -> tuple[int, int]:
    """Tokens of prompt and answer."""
    try:
        usage = json.loads(whole.body)["usage"]
        return int(usage["prompt_tokens"]), int(usage.get("completion_tokens") or 0)
    except (ValueError, LookupError, TypeError):
        raise UpstreamError("the model server's answer cannot be read") from None


def _prompt_readouts(whole: Whole) -> Readouts:
    for one in whole.readouts():
        if one.stage == "prompt":
            return one
    raise UnreadableError("the engine sent no readouts; was it started with the plugin?")


def _answer(
    exchange: Exchange, request: GuardedRequest[Texts], ranked: Sequence[Ranked], documents: Sequence[str], path: str
) -> Fields:
    record, fields = exchange.record, request.fields
    shown = ranked[: fields.get("top_n") or len(ranked)]
    results: list[Fields] = [{"index": one.index, "relevance_score": one.score} for one in shown]
    if fields.get("return_documents"):
        results = [{**one, "document": {"text": documents[one["index"]]}} for one in results]
    answer: Fields = {
        "id": f"rerank-{record.request_id}",
        "model": request.model,
        "usage": {"prompt_tokens": record.prompt_tokens, "total_tokens": record.tokens},
        "results": results,
    }
    if path == COHERE:
        tokens = {"input_tokens": record.prompt_tokens, "output_tokens": record.completion_tokens}
        answer["meta"] = {"api_version": {"version": "2"}, "tokens": tokens}
    return answer
