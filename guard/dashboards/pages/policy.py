"""One policy: what it decides, which of its rules hit, and what its shadow would do."""

from __future__ import annotations

from guard.dashboards.panel import Page, Panel, Query, Row, rate, share

SELECTED = 'job=~"$job", policy="$policy"'
JUDGED = rate("guard_requests_total", f'{SELECTED}, action!="none"')

DECISIONS = Row(
    "Decisions",
    (
        Panel(
            "Actions", "What was decided.", (Query(rate("guard_requests_total", SELECTED, by="action"), "{{action}}"),),
            "reqps", "stacked",
        ),
        Panel(
            "Outcomes", "How its requests ended.",
            (Query(rate("guard_requests_total", SELECTED, by="outcome"), "{{outcome}}"),), "reqps", "stacked",
        ),
        Panel(
            "Blocked", "Share of what it judged, beside the same a day before.",
            (
                Query(share(rate("guard_requests_total", f'{SELECTED}, action="block"'), JUDGED), "now"),
                Query('max(guard:block_share:rate15m{job=~"$job", policy="$policy"} offset 1d)', "a day before"),
            ),
            "percentunit", empty="no requests came; the day before needs a day of recorded values",
        ),
    ),
)  # fmt: skip

RULES = Row(
    "Rules",
    (
        Panel(
            "Enforced rules that hit",
            "allow: it could not be judged, and on_error lets pass.",
            (
                Query(
                    rate("guard_rule_hits_total", f'{SELECTED}, mode="enforce"', by="rule, action"),
                    "{{rule}} {{action}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Rules in shadow",
            "What they would have done.",
            (
                Query(
                    rate("guard_rule_hits_total", f'{SELECTED}, mode="shadow"', by="rule, action"),
                    "{{rule}} {{action}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Thresholds",
            "What its rules compare scores with.",
            (
                Query(
                    f"max by (rule, detector, bound) (guard_rule_threshold{{{SELECTED}}})",
                    "{{rule}}: {{detector}} {{bound}}",
                ),
            ),
            "none",
            "table",
        ),
    ),
)

CHANGES = Row(
    "Beside it, and its files",
    (
        Panel(
            "Shadow policy",
            "Decisions (first) and what the policy in shadow beside it would have done.",
            (
                Query(
                    rate("guard_shadow_decisions_total", SELECTED, by="shadow, action, would"),
                    "{{action}} → {{shadow}} {{would}}",
                ),
            ),
            "reqps",
            empty="it has no policy in shadow beside it",
        ),
        Panel(
            "Content in force",
            "Its hash; more than one while processes do not agree.",
            (Query(f"count by (hash) (guard_policy_info{{{SELECTED}}} == 1)", "{{hash}}"),),
            "none",
            "table",
        ),
        Panel(
            "Loaded",
            "When the policies that judge were loaded.",
            (Query('min(guard_policy_loaded_timestamp_seconds{job=~"$job"}) * 1000'),),
            "dateTimeFromNow",
            "number",
        ),
    ),
)

POLICY = Page(
    "guard-policy",
    "Guard / One policy",
    "What one policy decides, which of its rules hit, and what its shadow would do.",
    (DECISIONS, RULES, CHANGES),
    {"policy": 'label_values(guard_policy_info{job=~"$job"}, policy)'},
    several=False,
)
