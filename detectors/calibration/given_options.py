"""Which options of ``guard calibrate`` say anything for which kinds.

Owns that none is given in vain: what would be ignored is refused, with the kinds that it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import typer

READ_INSIDE = ("attention_tracker", "probe", "combination", "tool_call_risk")
"""Kinds that are fitted to what an engine reads of the rows of ``--data``."""
THRESHOLD = ("threshold",)
FITTED = (*READ_INSIDE, "text_baseline", "h_node", "science_hallucination", "steering")

USED_BY: Mapping[str, Sequence[str]] = {
    "model": FITTED,
    "data": (*READ_INSIDE, "text_baseline"),
    "rows": FITTED,
    "out": FITTED,
    "pooling": ("probe", "combination"),
    "windows": ("probe",),
    "seed": FITTED,
    "url": READ_INSIDE,
    "api_key": READ_INSIDE,
    "force": ("steering",),
    "ledger": THRESHOLD,
    "detector": THRESHOLD,
    "config": THRESHOLD,
    "budget": THRESHOLD,
}
"""Option -> kinds that use it. That ``h_node`` and ``science_hallucination`` refuse ``--url`` is told elsewhere."""


def in_vain(context: typer.Context, kinds: Sequence[str]) -> Iterator[str]:
    """Of options that were given and that none of ``kinds`` uses, what to say. One with its default says nothing that
    would be ignored, and recorded commands have them."""
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    for option, users in USED_BY.items():
        source, value = context.get_parameter_source(option), context.params.get(option)
        if source is None or source.name != "COMMANDLINE" or value == defaults.get(option) or value == ["all"]:
            continue
        if not set(users) & set(kinds):
            yield f"--{option.replace('_', '-')} is for {', '.join(users)}, and says nothing for {', '.join(kinds)}"
