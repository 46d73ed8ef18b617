"""What detectors say, whether it is still what they were calibrated on, and what rules make of it."""

from __future__ import annotations

from guard.dashboards.panel import Page, Panel, Query, Row, quantiles, rate, share

SELECTED = 'job=~"$job", detector=~"$detector"'
RESULTS = "guard_detector_results_total"
NOT_SCORED = "no score in this time"

SCORES = Row(
    "Scores",
    (
        Panel(
            "Distribution",
            "Scores over time, of the chosen detectors together: choose one.",
            (Query(f"sum by (le) (increase(guard_detector_score_bucket{{{SELECTED}}}[$__rate_interval]))", "{{le}}"),),
            "none",
            "heatmap",
            12,
        ),
        Panel(
            "Quantiles",
            "Of each detector's scores.",
            quantiles("guard_detector_score", SELECTED, by="detector", legend="{{detector}}"),
            "none",
            width=12,
            empty=NOT_SCORED,
        ),
        Panel(
            "Mean",
            "Of each detector's scores.",
            (
                Query(
                    share(
                        rate("guard_detector_score_sum", SELECTED, by="detector"),
                        rate("guard_detector_score_count", SELECTED, by="detector"),
                    ),
                    "{{detector}}",
                ),
            ),
            "none",
            empty=NOT_SCORED,
        ),
        Panel(
            "Drift",
            "The largest difference between the last hour's distribution and the last day's (Kolmogorov-Smirnov): 0, "
            "they are the same; 1, they have nothing in common. Recorded by the rules; alerts from 0.2 on.",
            (Query(f"max by (detector) (guard:detector_score:drift{{{SELECTED}}})", "{{detector}}"),),
            "none",
            empty="the recording rules need an hour of scores, or two evaluations at least",
        ),
        Panel(
            "Thresholds in force",
            "What rules compare scores with.",
            (
                Query(
                    f"max by (policy, rule, detector, bound) (guard_rule_threshold{{{SELECTED}}})",
                    "{{policy}}/{{rule}}: {{detector}} {{bound}}",
                ),
            ),
            "none",
            "table",
        ),
    ),
)

HEALTH = Row(
    "Whether there are scores",
    (
        Panel(
            "Results by status",
            "late: not in time; dropped: the engine had no space; not_applicable: nothing in the detector's scope.",
            (Query(rate(RESULTS, SELECTED, by="detector, status"), "{{detector}} {{status}}"),),
            "cps",
            "stacked",
        ),
        Panel(
            "Captured of seen",
            "Share of requests in a detector's scope that have a score.",
            (
                Query(
                    share(
                        rate(RESULTS, f'{SELECTED}, status="scored"', by="detector"),
                        rate(RESULTS, f'{SELECTED}, status!="not_applicable"', by="detector"),
                    ),
                    "{{detector}}",
                ),
            ),
            "percentunit",
            empty=NOT_SCORED,
        ),
        Panel(
            "Computing",
            "The detector's own time for one score.",
            quantiles("guard_detector_seconds", SELECTED, by="detector", legend="{{detector}}"),
            "s",
            empty=NOT_SCORED,
        ),
    ),
)

DETECTORS = Page(
    "guard-detectors",
    "Guard / Detectors",
    "Score distributions, drift, thresholds, and results without a score.",
    (SCORES, HEALTH),
    {"detector": 'label_values(guard_detector_score_count{job=~"$job"}, detector)'},
)
