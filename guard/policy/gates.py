"""Steering rules as the engine takes them: vectors, and the gate that holds them back as a gate of the spec.

Owns the way from a rule's ``gate`` to the readout that it names. What a gate does is the aperture's
(``guard.mia.spec.Gate``).
"""

from __future__ import annotations

from collections.abc import Mapping

from guard.mia.spec import Gate, ProbeCapture
from guard.policy.measuring import GATE_PREFIX, Measurement, Steering
from guard.policy.schema import Rule, SteeringGate


def steering_of(rule: Rule, measurements: Mapping[str, Measurement]) -> Steering:
    """Raises ``ValueError`` for a gate on a detector that cannot hold one."""
    if rule.gate is None:
        return Steering(rule.name, rule.steer)
    if rule.gate.probe is not None:
        name = f"{GATE_PREFIX}{rule.name}"
        capture = ProbeCapture(probe=rule.gate.probe, positions=rule.gate.positions)
        return _gated(rule, Gate(readout=name, above=rule.gate.above, below=rule.gate.below), {name: capture}, None)
    assert rule.gate.detector is not None
    one = measurements[rule.gate.detector]
    if one.depends_on_conversation:
        raise ValueError("a gate's detector reads every request: it has no scope, and no words in its spans")
    return _gated(rule, _on_attention(rule.gate, one), {}, one.key)


def _gated(rule: Rule, gate: Gate, probes: Mapping[str, ProbeCapture], reads: str | None) -> Steering:
    return Steering(rule.name, tuple(steer.model_copy(update={"gate": gate}) for steer in rule.steer), probes, reads)


def _on_attention(gate: SteeringGate, one: Measurement) -> Gate:
    span = f"{one.key}.{gate.span}"
    captures = [name for name, capture in one.attention.items() if span in capture.spans]
    if len(captures) != 1:
        spans = {name for capture in one.attention.values() for name in capture.spans}
        have = sorted(name.removeprefix(f"{one.key}.") for name in spans)
        raise ValueError(
            f"{one.detector.kind} reads the attention on {gate.span!r} {len(captures)} times, where a gate needs once; "
            f"it reads: {', '.join(have) or 'none'}"
        )
    return Gate(readout=captures[0], span=span, above=gate.above, below=gate.below)
