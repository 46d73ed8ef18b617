"""The conversation in which a model is asked whether a reference supports a claim.

Owns its words, with two examples for each label. A classifier is fitted to the state in which the model would answer,
so that other words need another classifier: ``PROMPT_SHA256`` says which words these are.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal

Label = Literal["entailment", "contradiction", "unverifiable"]
LABELS: tuple[Label, ...] = ("entailment", "contradiction", "unverifiable")

SYSTEM = (
    "You check claims against a reference. Answer with one word: entailment if the reference says that the claim is "
    "true, contradiction if it says that the claim is false, unverifiable if it says neither."
)

EXAMPLES: tuple[tuple[str, str, Label], ...] = (
    (
        "Water samples from all twelve wells stayed below the limit for nitrate throughout the year.",
        "No well exceeded the nitrate limit.",
        "entailment",
    ),
    (
        "Mice that were fed the extract gained less weight than the control group, although both ate the same amount.",
        "The extract made mice eat less.",
        "contradiction",
    ),
    (
        "The alloy was annealed at 450 degrees for two hours before its hardness was measured.",
        "The alloy resists corrosion in sea water.",
        "unverifiable",
    ),
    (
        "In the second trial 34 of 50 seedlings survived the frost; in the first one 12 of 50 did.",
        "More seedlings survived the frost in the second trial than in the first.",
        "entailment",
    ),
    (
        "The survey covered households in three coastal towns and was answered by 210 people.",
        "Most people who answered the survey were older than sixty.",
        "unverifiable",
    ),
    (
        "The new sensor draws 3 milliwatts, half of what its predecessor needed.",
        "The new sensor needs more power than the one before it.",
        "contradiction",
    ),
)
"""Reference, claim, label."""


def question(reference: str, claim: str) -> str:
    return f"Reference: {reference}\nClaim: {claim}"


def conversation(reference: str, claim: str) -> tuple[dict[str, str], ...]:
    """Messages that end where the model would say the label."""
    messages = [{"role": "system", "content": SYSTEM}]
    for example, claimed, label in EXAMPLES:
        messages += [
            {"role": "user", "content": question(example, claimed)},
            {"role": "assistant", "content": label},
        ]
    return (*messages, {"role": "user", "content": question(reference, claim)})


PROMPT_SHA256 = hashlib.sha256(json.dumps(conversation("", "")).encode()).hexdigest()
