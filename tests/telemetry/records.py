"""Records of requests as the proxy's stages leave them, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from detectors.base import Score
from guard.policy import Decision, RuleHit
from guard.telemetry.metrics import Metrics, PolicyLabels
from guard.telemetry.record import RequestRecord

CHAT = "/v1/chat/completions"
DEFAULT = PolicyLabels(
    "default",
    "0" * 64,
    ("injection", "distracted"),
    {"injection": "probe", "focus": "attention_tracker"},
    (("injection", "injection", "at_least", 0.91),),
)


def metrics_of(*policies: PolicyLabels, routes: tuple[str, ...] = (CHAT, "other")) -> Metrics:
    """As a proxy with these policies makes them; with a shadow beside the first."""
    metrics = Metrics(routes)
    metrics.show(policies or (DEFAULT,), [("default", "next")])
    return metrics


def record(**fields: Any) -> RequestRecord:
    return RequestRecord(**{"request_id": "r-1", "route": CHAT, "policy": "default", "policy_hash": "0" * 64, **fields})


def blocked() -> RequestRecord:
    """One enforced rule blocked it, a shadow rule would have flagged it, and one of its detectors failed."""
    block = RuleHit("injection", "block", "enforce", "injection 0.97 >= 0.91", on_error=False)
    shadow = RuleHit("distracted", "flag", "shadow", "focus unavailable: late: on_error flag", on_error=True)
    return record(
        model="smollm2-135m",
        scores={"injection": Score("scored", 0.97), "focus": Score("unavailable", reason="late")},
        decision=Decision("block", "injection", block.reason, "No.", (block, shadow), (), (), "block"),
        outcome="blocked",
        status=400,
        error_code="content_filter",
        prompt_tokens=12,
        own_s=0.0004,
        verdict_s=0.03,
        upstream_first_byte_s=0.029,
        upstream_s=0.031,
        total_s=0.0321,
    )
