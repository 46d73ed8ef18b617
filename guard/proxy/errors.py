"""Everything that the proxy itself answers with an error, in the shape that OpenAI's clients read.

    ApiError
    ├── InvalidRequestError       400  the body is no request, or none that can be guarded
    │   ├── TooLargeError         413  the body is larger than the limit
    │   ├── HeadTooLargeError     431  the request line and headers are larger than the limit, or too many
    │   ├── MediaTypeError        415  the body is not declared to be JSON
    │   └── SlowBodyError         408  the body did not come in time
    ├── InvalidKeyError           401  no API key, or an unknown one
    ├── ForbiddenHostError        403  without API keys only this machine is answered
    ├── NotFoundError             404  a path that the guard does not serve
    │   └── ModelNotFoundError    404  a model that vLLM does not serve
    ├── MethodError               405  the wrong method for the path
    ├── RateLimitedError          429  a limit of the key or of its tenant is reached
    ├── TooManyTextsError         429  too many texts of the key wait to be read
    ├── OverloadedError           503  the proxy has as many requests under way as it may
    ├── TextsWaitError            503  the request's texts waited too long to be read
    ├── BlockedError              400  a rule hit
    ├── GuardUnavailableError     503  a rule that blocks on_error got no score
    ├── SteeringError             502  vLLM cannot steer as the policy says
    ├── RoutingError              502  vLLM does not serve the model that a rule routes to
    ├── RedactionError            502  a rule redacts documents, whose order would say nothing
    ├── UpstreamError             502  vLLM cannot be reached, or its answer broke off
    │   ├── LoopError             508  its address leads back to the guard
    │   ├── UpstreamBusyError     503  it does not accept connections in time
    │   ├── UpstreamLostError     502  the process that asks other providers ended
    │   └── UpstreamSilentError   504  it accepted, and then said nothing
    ├── StoppedError              503  the proxy was told to stop
    └── InternalError             500  a fault of the proxy

Owns status, ``error.type``, ``error.code`` and the outcome for ledger and metrics. Never holds prompt text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

import aiohttp

from guard.telemetry.record import LimitKind, LimitScope, Outcome

NOT_AGAIN: Mapping[str, str] = {"x-should-retry": "false"}
"""For OpenAI's clients: the same request would come to the same end."""


SOON: Mapping[str, str] = {"retry-after": "1", "retry-after-ms": "1000"}
"""Headers for who may well try again at once."""


class ApiError(Exception):
    """An answer that is an error. ``param`` is the field of the request that it is about; ``limit``: whose limit, and
    which, is reached."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"
    outcome: ClassVar[Outcome] = "internal_error"
    headers: Mapping[str, str] = {}
    limit: tuple[LimitScope, LimitKind] | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def to_wire(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def to_json(self, *, with_type: bool = False) -> bytes:
        """``with_type``: with the field by which Anthropic's clients know an error."""
        return json.dumps(({"type": "error"} if with_type else {}) | self.to_wire()).encode()


class InternalError(ApiError):
    """A fault of the proxy."""


class InvalidRequestError(ApiError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"
    outcome = "refused"


class TooLargeError(InvalidRequestError):
    status = 413
    code = "request_too_large"


class HeadTooLargeError(InvalidRequestError):
    status = 431
    code = "headers_too_large"


class MediaTypeError(InvalidRequestError):
    status = 415
    code = "unsupported_media_type"


class SlowBodyError(InvalidRequestError):
    status = 408
    code = "request_timeout"


class InvalidKeyError(ApiError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    outcome = "refused"
    headers: Mapping[str, str] = {"www-authenticate": "Bearer"}


class ForbiddenHostError(ApiError):
    status = 403
    type = "permission_error"
    code = "forbidden_host"
    outcome = "refused"


class NotFoundError(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"
    outcome = "refused"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class MethodError(ApiError):
    """``allowed``: the method that the path takes."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    outcome = "refused"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.headers = {"allow": allowed}


class RateLimitedError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    outcome = "refused"

    def __init__(self, message: str, retry_s: float, limit: tuple[LimitScope, LimitKind]) -> None:
        super().__init__(message)
        self.headers = _later(retry_s)
        self.limit = limit


class OverloadedError(ApiError):
    status = 503
    code = "overloaded"
    outcome = "refused"
    limit = ("everybody", "concurrent")

    def __init__(self, message: str, retry_s: float) -> None:
        super().__init__(message)
        self.headers = _later(retry_s)


class TooManyTextsError(ApiError):
    status = 429
    type = "rate_limit_error"
    code = "too_many_texts"
    outcome = "refused"
    headers: Mapping[str, str] = SOON


class TextsWaitError(ApiError):
    status = 503
    code = "texts_wait"
    outcome = "refused"
    headers: Mapping[str, str] = SOON


def _later(retry_s: float) -> dict[str, str]:
    """When to try again: in whole seconds for everybody, in milliseconds for OpenAI's clients."""
    return {
        "retry-after": str(max(1, math.ceil(retry_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_s * 1000))),
    }


class BlockedError(ApiError):
    """What a rule measured is why; clients know the code from other providers' filters."""

    status = 400
    type = "invalid_request_error"
    code = "content_filter"
    outcome = "blocked"
    headers = NOT_AGAIN


class GuardUnavailableError(ApiError):
    """Nothing was measured, and the policy lets nothing pass unmeasured."""

    status = 503
    code = "guard_unavailable"
    outcome = "guard_unavailable"
    headers = NOT_AGAIN


class SteeringError(ApiError):
    status = 502
    code = "steering_unavailable"
    outcome = "guard_unavailable"
    headers = NOT_AGAIN


class RoutingError(ApiError):
    status = 502
    code = "routing_unavailable"
    outcome = "guard_unavailable"
    headers = NOT_AGAIN


class RedactionError(ApiError):
    status = 502
    code = "redaction_unavailable"
    outcome = "guard_unavailable"
    headers = NOT_AGAIN


class StoppedError(ApiError):
    status = 503
    code = "stopping"
    outcome = "stopped"
    headers: Mapping[str, str] = {"retry-after": "1"}


class UpstreamError(ApiError):
    status = 502
    code = "upstream_unavailable"
    outcome = "upstream_unavailable"


class LoopError(UpstreamError):
    status = 508
    code = "loop_detected"
    headers = NOT_AGAIN


class UpstreamBusyError(UpstreamError):
    status = 503
    headers: Mapping[str, str] = {"retry-after": "1"}


class UpstreamLostError(UpstreamError):
    headers = SOON


class UpstreamSilentError(UpstreamError):
    status = 504


Told = tuple[tuple[type[Exception], type[UpstreamError], str], ...]
"""What is raised, what it is told as, and our words."""

FROM_AIOHTTP: Told = (
    (aiohttp.ConnectionTimeoutError, UpstreamBusyError, "the model server does not accept connections in time"),
    (TimeoutError, UpstreamSilentError, "the model server did not answer in time"),
    (aiohttp.ClientConnectorError, UpstreamError, "the model server cannot be reached"),
    (aiohttp.ClientError, UpstreamError, "the model server closed the connection before its answer was complete"),
    (OSError, UpstreamError, "the connection to the model server failed"),
)
"""The first that fits counts. aiohttp's own texts hold addresses, so clients get ours."""


class upstream_errors:  # noqa: N801 - used as a function is
    """What the client library raises inside, as errors of ours. A class, since every piece of an answer enters it."""

    __slots__ = ("_told",)

    def __init__(self, told: Told = FROM_AIOHTTP) -> None:
        self._told = told

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for foreign, ours, message in self._told if error is not None else ():
            if isinstance(error, foreign):
                raise ours(message) from error
