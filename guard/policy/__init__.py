"""Policies: YAML files that say what is measured on a request and what is done about it."""

from guard.policy.bound import BoundPolicy, bind, build_detectors
from guard.policy.engine import Decision, RuleHit
from guard.policy.loading import LoadedPolicy, load_policy
from guard.policy.yaml_file import PolicyError

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
