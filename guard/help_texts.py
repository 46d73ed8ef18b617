"""The long help of ``guard serve`` and ``guard proxy``. Owns the words; one string is one paragraph."""

from __future__ import annotations

_SETTINGS = (
    "A setting that is given in several ways counts in this order: option, environment variable, file of --config, "
    "default. docs/api.md lists all settings. A value that cannot be used stops the start, with its name."
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
        "\b\nExamples:\n  guard serve\n  guard serve --model owner/name --policy policies -- --max-model-len 8192",
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
        "  guard proxy --upstream http://gpu:8000 --policy policies\n"
        "  guard keys create --file keys.yaml --tenant acme --requests-per-s 20\n"
        "  guard proxy --upstream http://gpu-1:8000,http://gpu-2:8000 --host 0.0.0.0 --keys keys.yaml\n"
        "  guard proxy --config guard.yaml --set max_body_bytes=1048576",
    )
)

EXIT_HELP = "Exit status: 0 after a signal, 1 when it cannot start or run, 2 for an option that is none."
