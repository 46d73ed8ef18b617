"""A steering folder is loaded whole and checked, or the engine does not start."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from guard.mia.steering import SteeringFolderError, load_bank, vector_names

CPU = torch.device("cpu")


def test_vectors_are_found_by_name_and_stacked_in_the_asked_order(tmp_path: Path) -> None:
    for name, value in (("b", 2.0), ("a", 1.0)):
        save_file({"vector": torch.full((4,), value)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "notes.txt").write_text("not a vector")
    assert vector_names(tmp_path) == ("a", "b")
    bank = load_bank(tmp_path, ("b", "a"), 4, CPU)
    assert bank.vectors[:, 0].tolist() == [2.0, 1.0]
    assert bank.slot("a") == 1
    assert load_bank(None, (), 4, CPU).vectors.shape == (0, 4)


@pytest.mark.parametrize(
    "tensors",
    [
        {"vector": torch.ones(5)},
        {"vector": torch.ones(1, 4)},
        {"direction": torch.ones(4)},
        {"vector": torch.zeros(4)},
        {"vector": torch.tensor([1.0, float("nan"), 0.0, 0.0])},
        {"vector": torch.full((4,), 1e300, dtype=torch.float64)},
        {"vector": torch.full((4,), 1e-300, dtype=torch.float64)},
        {"vector": torch.full((4,), 1e30)},
        {"vector": torch.full((4,), 1e-30)},
        {"vector": torch.ones(4, dtype=torch.int64)},
        {"vector": torch.ones(4, dtype=torch.bool)},
    ],
)
def test_a_vector_that_does_not_fit_the_model_stops_the_start_and_names_the_file(tmp_path: Path, tensors: dict) -> None:
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(SteeringFolderError, match=r"bad\.safetensors"):
        load_bank(tmp_path, ("bad",), 4, CPU)


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"{" * 64])
def test_a_file_that_is_not_safetensors_is_never_unpickled(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "evil.safetensors").write_bytes(content)
    with pytest.raises(SteeringFolderError, match=r"evil\.safetensors"):
        load_bank(tmp_path, ("evil",), 4, CPU)


def test_a_missing_folder_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SteeringFolderError, match="does not exist"):
        vector_names(tmp_path / "nowhere")
    with pytest.raises(SteeringFolderError, match=r"gone\.safetensors"):
        load_bank(tmp_path, ("gone",), 4, CPU)


@pytest.mark.parametrize("name", ["../other/vector", "/etc/passwd", "a/b", "", "a" * 65, "a\n"])
def test_a_name_is_never_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(SteeringFolderError, match="no name of a vector"):
        load_bank(tmp_path, (name,), 4, CPU)
