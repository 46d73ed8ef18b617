"""Is everything well: traffic, what was decided, what the guard costs, and how the engine is."""

from __future__ import annotations

from guard.dashboards.panel import Page, Panel, Query, Row, quantile, quantiles, rate, share

JOB = 'job=~"$job"'
ENGINE = 'job=~"$engine"'
REQUESTS = rate("guard_requests_total", JOB)
JUDGED = rate("guard_requests_total", f'{JOB}, action!="none"')
RESULTS = "guard_detector_results_total"
SEEN = f'{JOB}, status!="not_applicable"'
NO_SCORE = f'{JOB}, status=~"unavailable|late|dropped"'
NO_TRAFFIC = "no requests came"

GLANCE = Row(
    "At a glance",
    (
        Panel("Requests", "Requests that ended, a second.", (Query(REQUESTS),), "reqps", "number", 4),
        Panel(
            "Blocked",
            "Share of judged requests that a rule blocked.",
            (Query(share(rate("guard_requests_total", f'{JOB}, action="block"'), JUDGED)),),
            "percentunit",
            "number",
            4,
            NO_TRAFFIC,
        ),
        Panel(
            "Detectors without a score",
            "Share of results that should have been a score and are none: on_error or on_timeout decided instead.",
            (Query(share(rate(RESULTS, NO_SCORE), rate(RESULTS, SEEN))),),
            "percentunit",
            "number",
            4,
            NO_TRAFFIC,
            (0.01, 0.05),
        ),
        Panel(
            "Added latency, p99",
            "The guard's own work before the first byte.",
            (Query(quantile(0.99, "guard_added_latency_seconds", JOB)),),
            "s",
            "number",
            4,
            NO_TRAFFIC,
            (0.003, 0.01),
        ),
        Panel(
            "Engines up",
            "Share of vLLM servers that Prometheus can scrape.",
            (Query(f"avg(up{{{ENGINE}}})"),),
            "percentunit",
            "number",
            4,
            thresholds=(0.999, 0.5),
        ),
        Panel(
            "Policy files in force",
            "1 when what the files say is what judges, in every process.",
            (Query(f"min(guard_policy_files_in_force{{{JOB}}})"),),
            "none",
            "number",
            4,
            thresholds=(1, 0.5),
        ),
    ),
)

TRAFFIC = Row(
    "Traffic and decisions",
    (
        Panel(
            "Requests by action",
            "What was decided; none: it did not come to a decision.",
            (Query(rate("guard_requests_total", JOB, by="action"), "{{action}}"),),
            "reqps",
            "stacked",
        ),
        Panel(
            "Requests by outcome",
            "How they ended. guard_unavailable: a rule that blocks on_error had no score.",
            (Query(rate("guard_requests_total", JOB, by="outcome"), "{{outcome}}"),),
            "reqps",
            "stacked",
        ),
        Panel(
            "Under way",
            "Requests in the proxies, by route.",
            (Query(f"sum by (route) (guard_requests_in_flight{{{JOB}}})", "{{route}}"),),
            "short",
            "stacked",
        ),
        Panel(
            "Rules that hit",
            "Enforced rules, by what they did. allow: it could not be judged, and on_error lets pass.",
            (
                Query(
                    rate("guard_rule_hits_total", f'{JOB}, mode="enforce"', by="policy, rule, action"),
                    "{{policy}}/{{rule}} {{action}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Rules in shadow",
            "What would have been done.",
            (
                Query(
                    rate("guard_rule_hits_total", f'{JOB}, mode="shadow"', by="policy, rule, action"),
                    "{{policy}}/{{rule}} {{action}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Refused by limits",
            "429 and 503, by whose limit and which.",
            (Query(rate("guard_limit_refusals_total", JOB, by="scope, limit"), "{{scope}} {{limit}}"),),
            "reqps",
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Added by the guard",
            "Its own work before the first byte, waiting for vLLM left out.",
            quantiles("guard_added_latency_seconds", JOB),
            "s",
            empty=NO_TRAFFIC,
        ),
        Panel(
            "First byte held for the verdict",
            "From sending upstream to the decision, beside vLLM's own time to the first token.",
            (
                *quantiles("guard_verdict_seconds", JOB, legend="verdict"),
                Query(quantile(0.99, "vllm:time_to_first_token_seconds", ENGINE), "vLLM's first token p99"),
            ),
            "s",
            empty=NO_TRAFFIC,
        ),
        Panel(
            "Kept back in streams, and second passes",
            "The longest time that a part of a judged stream waited; how long answers waited to be read again, and "
            "prompts for their windows.",
            (
                Query(quantile(0.99, "guard_stream_held_seconds", JOB), "held p99"),
                Query(quantile(0.99, "guard_second_pass_seconds", JOB), "second pass p99"),
                Query(quantile(0.99, "guard_window_passes_seconds", JOB), "windows p99"),
            ),
            "s",
            empty="no rule judged a stream, or had the model read an answer or windows",
        ),
        Panel(
            "Upstream",
            "To the first byte, and to the end of vLLM's answer.",
            (
                *quantiles("guard_upstream_first_byte_seconds", JOB, legend="first byte"),
                Query(quantile(0.5, "guard_upstream_seconds", JOB), "whole p50"),
                Query(quantile(0.99, "guard_upstream_seconds", JOB), "whole p99"),
            ),
            "s",
            empty=NO_TRAFFIC,
        ),
        Panel(
            "Detectors' computing",
            "99th percentile for one score.",
            (Query(quantile(0.99, "guard_detector_seconds", JOB, by="detector"), "{{detector}}"),),
            "s",
            empty=NO_TRAFFIC,
        ),
        Panel(
            "From the engine's step to the readout",
            "Courier lag; and how long prompts that ask for readouts waited for their first step.",
            (
                Query(quantile(0.99, "mia_courier_lag_seconds", ENGINE, by="stage"), "lag p99, {{stage}}"),
                Query(quantile(0.99, "mia_queue_wait_seconds", ENGINE), "queue wait p99"),
            ),
            "s",
            empty=NO_TRAFFIC,
        ),
    ),
)

HEALTH = Row(
    "Engine",
    (
        Panel(
            "Requests in vLLM",
            "Running and waiting.",
            (
                Query(f"sum(vllm:num_requests_running{{{ENGINE}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{ENGINE}}})", "waiting"),
            ),
        ),
        Panel(
            "Key cache in use",
            "Of each server.",
            (Query(f"max by (instance) (vllm:kv_cache_usage_perc{{{ENGINE}}})", "{{instance}}"),),
            "percentunit",
        ),
        Panel(
            "Tokens",
            "Of prompts and answers, a second.",
            (
                Query(rate("vllm:prompt_tokens_total", ENGINE), "prompt"),
                Query(rate("vllm:generation_tokens_total", ENGINE), "generated"),
            ),
            "cps",
        ),
        Panel(
            "Read by the aperture",
            "Share of prompts in the engine that something was asked about. Nothing of what the model computes guarded "
            "the rest: their policy reads text alone, or they did not come through a proxy.",
            (
                Query(
                    share(rate("mia_requests_total", f'{ENGINE}, asks!="nothing"'), rate("mia_requests_total", ENGINE)),
                    "read",
                ),
            ),
            "percentunit",
            empty=NO_TRAFFIC,
        ),
        Panel(
            "Captured",
            "Bytes of values that left the engine, a second, by kind of readout.",
            (Query(rate("mia_captured_bytes_total", ENGINE, by="kind"), "{{kind}}"),),
            "Bps",
            "stacked",
        ),
        Panel(
            "Readouts that were dropped",
            "By the engine's setting that says how much space there is.",
            (Query(rate("mia_dropped_readouts_total", ENGINE, by="reason"), "{{reason}}"),),
            "cps",
        ),
    ),
)

RECORDS = Row(
    "Ledger, policy files, malformed requests",
    (
        Panel(
            "Ledger",
            "Entries, a second. delayed: the disk refused and is tried again; failed, dropped: lost.",
            (Query(rate("guard_ledger_entries_total", JOB, by="result"), "{{result}}"),),
            "cps",
        ),
        Panel(
            "Ledger entries that wait",
            "In memory, to be written; more than 100,000 of a process are dropped.",
            (Query(f"sum by (instance) (guard_ledger_waiting{{{JOB}}})", "{{instance}}"),),
        ),
        Panel(
            "Changes of policy files",
            "failure: the policies before them stay in force.",
            (
                Query(
                    f"sum by (result) (increase(guard_policy_reloads_total{{{JOB}}}[$__rate_interval]))", "{{result}}"
                ),
            ),
        ),
        Panel(
            "Limits not shared",
            "Requests with limits that a replica counted for itself, since Redis did not answer.",
            (Query(rate("guard_limit_fallbacks_total", JOB), "fallbacks"),),
            "reqps",
        ),
        Panel(
            "Malformed requests",
            "What came over connections and is no request; in no other number.",
            (Query(rate("guard_malformed_requests_total", JOB, by="reason"), "{{reason}}"),),
            "reqps",
        ),
    ),
)

OVERVIEW = Page(
    "guard-overview",
    "Guard / Overview",
    "Traffic, decisions, what the guard costs, and the engine behind it.",
    (GLANCE, TRAFFIC, LATENCY, HEALTH, RECORDS),
    {},
)
