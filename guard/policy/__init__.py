"""Policies: YAML files that say what is measured on a request and what is done about it."""

from guard.policy.bound import BoundPolicy, bind, build_detectors
from guard.policy.engine import Decision, RuleHit
from guard.policy.store import LoadedPolicy, PolicyError, load_policy

__all__ = [
    "BoundPolicy",
    "Decision",
    "LoadedPolicy",
    "PolicyError",
    "RuleHit",
    "bind",
    "build_detectors",
    "load_policy",
]
