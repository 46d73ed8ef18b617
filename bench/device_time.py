"""What runs on the device in a step that decodes, from the profiles of a short run and a longer one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Times(NamedTuple):
    """Of one kernel, or of several together, in a step."""

    runs: float
    us: float


@dataclass(frozen=True)
class Step:
    """One variant's step of one request. ``kernels`` by name."""

    model: str
    variant: str
    kernels: Mapping[str, Times]

    @property
    def whole(self) -> Times:
        return Times(sum(one.runs for one in self.kernels.values()), sum(one.us for one in self.kernels.values()))


def steps(profiles: Iterable[Mapping[str, Any]]) -> list[Step]:
    """The longer run minus the shorter, over the steps between them. One without its partner is left out, and those of
    several requests, whose prompts fall into steps as they happen to arrive."""
    pairs: dict[tuple[str, str], list[tuple[int, Mapping[str, list[float]]]]] = defaultdict(list)
    for one in profiles:
        if one["requests"] == 1:
            pairs[one["model"], one["variant"]].append((one["output_tokens"], one["kernels"]))
    found = []
    for (model, variant), pair in pairs.items():
        if len(pair) != 2:
            continue
        (few, short), (many, long) = sorted(pair, key=lambda one: one[0])
        kernels = {}
        for name, (runs, us) in long.items():
            less = short.get(name, [0, 0.0])
            kernels[name] = Times((runs - less[0]) / (many - few), (us - less[1]) / (many - few))
        found.append(Step(model, variant, kernels))
    return found


def beside(step: Step, base: Step) -> list[tuple[str, Times]]:
    """What the step has more of than ``base``, or less, by kernel; what differs most in time comes first."""
    none = Times(0, 0.0)
    every = dict.fromkeys([*step.kernels, *base.kernels])
    of_both = ((name, step.kernels.get(name, none), base.kernels.get(name, none)) for name in every)
    more = [(name, Times(mine.runs - its.runs, mine.us - its.us)) for name, mine, its in of_both]
    return sorted(more, key=lambda one: -abs(one[1].us))
