"""Shipped files are found wherever the package lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard import data

CHECKOUT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", ["policies", "model_configs", "dashboards"])
def test_in_a_checkout_the_folders_beside_the_packages_are_used(kind: data.Kind) -> None:
    assert data.data_folder(kind) == CHECKOUT / kind


def test_in_a_wheel_the_folders_inside_the_package_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policies").mkdir()  # a folder of that name beside the package is not ours without a pyproject.toml
    monkeypatch.setattr(data, "_PACKAGE", tmp_path / "guard")
    assert data.data_folder("policies") == tmp_path / "guard" / "data" / "policies"


def test_the_default_policy_exists() -> None:
    assert data.default_policy().is_file()
