"""Writes the Kubernetes manifests that are other files in another wrapping: the policies and the alert rules."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "deploy" / "kubernetes"
WRITTEN = "# Written by scripts/kubernetes_copies.py from {}; a test compares.\n"

POLICIES = """\
apiVersion: v1
kind: ConfigMap
metadata:
  name: guard-policies
data:
  selection.yaml: |
    version: 1
    default: default
  default.yaml: |
"""
RULES = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: guard
  labels: {app.kubernetes.io/part-of: mia-guard}
spec:
"""


def main() -> None:
    for name, source, head, spaces in (
        ("policies.yaml", "policies/default.yaml", POLICIES, 4),
        ("rules.yaml", "dashboards/prometheus/rules.yml", RULES, 2),
    ):
        lines = (ROOT / source).read_text(encoding="utf-8").splitlines(keepends=True)
        indented = "".join(" " * spaces + line if line.strip() else line for line in lines)
        (TARGET / name).write_text(WRITTEN.format(source) + head + indented, encoding="utf-8")


if __name__ == "__main__":
    main()
