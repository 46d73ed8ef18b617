"""Who is steered, how strongly, and whether gates open."""

from __future__ import annotations

from guard.dashboards.panel import Page, Panel, Query, Row, quantiles, rate, share

JOB = 'job=~"$job"'
ENGINE = 'job=~"$engine"'
NOBODY = "nobody was steered"

DECIDED = Row(
    "Decided",
    (
        Panel(
            "Steered requests",
            "Requests that a rule steered, by policy.",
            (Query(rate("guard_requests_total", f'{JOB}, action="steer"', by="policy"), "{{policy}}"),),
            "reqps",
        ),
        Panel(
            "Rules that steer",
            "Hits, those in shadow too.",
            (
                Query(
                    rate("guard_rule_hits_total", f'{JOB}, action="steer"', by="policy, rule, mode"),
                    "{{policy}}/{{rule}} {{mode}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "How steered requests end",
            "By outcome.",
            (Query(rate("guard_requests_total", f'{JOB}, action="steer"', by="outcome"), "{{outcome}}"),),
            "reqps",
            "stacked",
        ),
    ),
)

DONE = Row(
    "Done in the engine",
    (
        Panel(
            "Asked of the aperture",
            "Prompts by what they ask for. refused: for something that this engine has no taps for, or that cannot be.",
            (
                Query(rate("mia_requests_total", ENGINE, by="asks"), "{{asks}}"),
                Query(rate("mia_refused_specs_total", ENGINE), "refused"),
            ),
            "reqps",
            "stacked",
        ),
        Panel(
            "Steered tokens",
            "limited: changed by less than was asked, for max_relative_dose.",
            (Query(rate("mia_steered_tokens_total", ENGINE, by="dose"), "{{dose}}"),),
            "cps",
            "stacked",
        ),
        Panel(
            "Steered answers",
            "Share of ended answers with steering of which at least one token was changed.",
            (
                Query(
                    share(
                        rate("mia_steered_requests_total", ENGINE),
                        rate("mia_requests_total", f'{ENGINE}, asks=~"steering|both"'),
                    ),
                    "steered of asked",
                ),
            ),
            "percentunit",
            empty=NOBODY,
        ),
        Panel(
            "Relative dose",
            "The largest change of each steering, relative to the residual stream's norm there.",
            quantiles("mia_steering_relative_dose", ENGINE),
            "none",
            empty=NOBODY,
        ),
        Panel(
            "Gates",
            "Of answers that ended: the gate opened, stayed shut, or could not be judged.",
            (Query(rate("mia_gates_total", ENGINE, by="result"), "{{result}}"),),
            "cps",
            "stacked",
        ),
        Panel(
            "Vector bank",
            "Vectors that requests may name, and room for vectors, of each server.",
            (
                Query(f"max by (instance) (mia_bank_vectors{{{ENGINE}}})", "{{instance}} vectors"),
                Query(f"max by (instance) (mia_bank_capacity{{{ENGINE}}})", "{{instance}} room"),
            ),
        ),
    ),
)

STEERING = Page(
    "guard-steering", "Guard / Steering", "Who is steered, how strongly, and whether gates open.", (DECIDED, DONE), {}
)
