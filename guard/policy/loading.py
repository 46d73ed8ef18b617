"""One policy from its file: read, merged with what it extends, checked against the schema, and named by a hash.

Owns the way from a file to a ``Policy``. Which of several policies judges a request is ``guard.policy.store``'s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from guard.policy.inheritance import read_merged
from guard.policy.schema import Policy
from guard.policy.yaml_file import PolicyError, locate, message_at, validated


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy that fits the schema. ``hash``: SHA-256 of its content, the same for any spelling of the same policy.

    ``files``: the policy's own file, and those that it extends.
    """

    policy: Policy
    path: Path
    hash: str
    root: yaml.Node
    files: tuple[Path, ...]

    def error(self, location: Sequence[str | int], message: str) -> PolicyError:
        """An error at a field of this policy, as the schema's own errors are shown."""
        return PolicyError(message_at(self.root, location, message))

    def file_of(self, location: Sequence[str | int]) -> Path:
        """The file in which a field was written."""
        return locate(self.root, location).path

    @property
    def label(self) -> str:
        """Name and hash, short, for headers and people."""
        return f"{self.policy.name}@{self.hash[:12]}"


def load_policy(path: Path) -> LoadedPolicy:
    """Read and check one file. Raises ``PolicyError``, never anything else."""
    root, files = read_merged(path)
    policy = validated(root, Policy)
    # Sorted, so that the hash outlives a field that moves in the schema.
    content = json.dumps(policy.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
    return LoadedPolicy(policy, path, hashlib.sha256(content.encode()).hexdigest(), root, files)


def digests(loaded: LoadedPolicy, files: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """Detector -> ``KIND@HASH`` of what its score depends on in a policy. Scores of two policies compare where these
    are the same.

    files: detector -> fingerprint of its calibration, which then stands behind: ``KIND@HASH+FILE``.
    """
    whole = {name: f"{use.kind}@{_digest(loaded, name)[:12]}" for name, use in loaded.policy.detectors.items()}
    return {name: f"{digest}+{file}" if (file := (files or {}).get(name)) else digest for name, digest in whole.items()}


def same_measurement(one: str, other: str) -> bool:
    """Whether two digests are of scores that compare. The file counts where both say which it was."""
    (plain, _, file), (like, _, another) = one.partition("+"), other.partition("+")
    return plain == like and (not file or not another or file == another)


def _digest(loaded: LoadedPolicy, name: str) -> str:
    use = loaded.policy.detectors[name]
    content = use.model_dump_json(exclude_defaults=True).encode()
    content += "".join(_digest(loaded, of) for _, of in sorted(use.inputs.items())).encode()
    if use.config is not None and use.config.endswith((".json", ".npz")):
        file = loaded.file_of(("detectors", name, "config")).parent / use.config
        # Two folders may have a file of that name; where it is missing nothing is measured with it.
        content += _without_calibration(file.read_bytes()) if file.is_file() else b""
    return hashlib.sha256(content).hexdigest()


def _without_calibration(content: bytes) -> bytes:
    """New thresholds leave scores as they are."""
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(raw, dict):
        return content
    return json.dumps({name: value for name, value in raw.items() if name != "calibration"}, sort_keys=True).encode()
