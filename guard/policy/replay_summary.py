"""What a replay came to, for people."""

from __future__ import annotations

from guard.policy.replay import Replayed, RuleAlone


def summary(result: Replayed) -> list[str]:
    """For people, one line each."""
    kept = ", ".join(f"{action} {count}" for action, count in sorted(result.unchanged.items())) or "none"
    lines = [
        f"{result.compared} requests compared, {result.changed()} change ({result.percent():.2f} %): "
        f"{result.changed('looser')} looser, {result.changed('stricter')} stricter; unchanged: {kept}"
    ]
    for change in sorted(result.changes.values(), key=lambda one: (not one.looser, -one.requests)):
        rules = ", ".join(f"{rule} {count}" for rule, count in change.rules.most_common())
        lines.append(
            f"  {change.before} -> {change.after}: {change.requests} ({rules}), such as {', '.join(change.examples)}"
        )
    if result.others:
        lines.append(f"  {result.others} requests were judged by other policies")
    if result.playground:
        lines.append(f"  {result.playground} runs of the console's playground are left out (--playground)")
    if result.undecided:
        lines.append(f"  {result.undecided} requests ended before a decision")
    if result.prompts_alone:
        lines.append(f"  {result.prompts_alone} of those that change would get an answer that nobody has judged")
    if result.cut_short:
        lines.append(f"  {result.cut_short} of those that change had their answer cut; nobody knows how it would go on")
    if result.not_judged:
        lines.append("what this policy changes and replay cannot judge, which a policy in shadow can:")
        lines += [f"  of {count} requests: {what}" for what, count in result.not_judged.most_common()]
    if result.without_contract:
        lines.append(f"  {result.without_contract} streams: their lines do not say by which streaming they were judged")
    if result.outranked:
        lines.append(f"  {result.outranked} of those compared lack a score, which could not have changed what is done")
    if result.incomplete:
        missing = ", ".join(f"{name} {count}" for name, count in result.not_measured.most_common())
        lacking = result.incomplete - result.not_told.total()
        if lacking:
            lines.append(f"  {lacking} requests lack a score as this policy measures it: {missing}")
            lines += [
                f"    {name}: {count} have one of this name, of another kind, spans, scope, inputs or file"
                for name, count in result.otherwise.most_common()
            ]
            lines += [
                f"    {name}: of {count} the answer was not judged" for name, count in result.unjudged.most_common()
            ]
            lines += [f"    {_alone(name, one)}" for name, one in result.alone.items()]
        lines += [f"  {count} requests cannot be decided again: not told: {why}"
                  for why, count in result.not_told.most_common()]  # fmt: skip
    if result.never_measured:
        lines.append(
            f"  no line has a score of {', '.join(result.never_measured)}: put this policy in shadow to get some"
        )
    if result.unreadable:
        lines.append(f"  {result.unreadable} lines are no entries")
    return lines


def _alone(name: str, one: RuleAlone) -> str:
    before = ", ".join(f"{action} {count}" for action, count in sorted(one.hits.items()))
    return f"rule {name}, by itself, hits {one.hits.total()} of {one.judged}" + (
        f"; they were: {before}" if before else ""
    )
