"""Policies: YAML files that say what is measured on a request and what is done about it."""

from guard.policy.bound import BoundPolicy, bind, build_detectors
from guard.policy.engine import Decision, RuleHit
from guard.policy.judges import Judges
from guard.policy.loading import LoadedPolicy, load_policy
from guard.policy.measuring import Question
from guard.policy.policy_set import PolicySet, load_policies
from guard.policy.selection import NoSuchPolicyError, RequestFacts
from guard.policy.store import PolicyStore
from guard.policy.yaml_file import PolicyError

__all__ = [
    "BoundPolicy",
    "Decision",
    "Judges",
    "LoadedPolicy",
    "NoSuchPolicyError",
    "PolicyError",
    "PolicySet",
    "PolicyStore",
    "Question",
    "RequestFacts",
    "RuleHit",
    "bind",
    "build_detectors",
    "load_policies",
    "load_policy",
]
