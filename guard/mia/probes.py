"""The operator's probes: linear readouts of the residual stream, loaded once at start, by name, from safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


class ProbeFileError(ValueError):
    """A probe that cannot be used; the message names the file and the remedy."""


@dataclass(frozen=True)
class ProbeBank:
    """All probes of an engine as one matrix, so that a step applies them at once.

    weight: ``[outputs, hidden_size]`` float32. bias: ``[outputs]`` float32. layers: the layer that each probe reads.
    columns: which outputs are a probe's.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    layers: dict[str, int]
    columns: dict[str, slice]

    @property
    def outputs(self) -> int:
        return len(self.bias)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: ``[n, hidden_size]``. Returns ``[n, outputs]`` float32; a row's are of use for its layer's probes."""
        return torch.addmm(self.bias, rows.float(), self.weight.T)


def load_probes(folder: Path | None, layers: dict[str, int], hidden_size: int, device: torch.device) -> ProbeBank:
    """Load the named probes. ``layers``: which layer each is for. Raises ``ProbeFileError``."""
    if layers and folder is None:
        raise ProbeFileError("probes are named without a probe_folder")
    loaded = {name: _load(folder / f"{name}.safetensors", n, hidden_size) for name, n in layers.items() if folder}
    columns, begin = {}, 0
    for name, (_, bias) in loaded.items():
        columns[name] = slice(begin, begin + len(bias))
        begin += len(bias)
    weights = [torch.empty(0, hidden_size), *(weight for weight, _ in loaded.values())]
    biases = [torch.empty(0), *(bias for _, bias in loaded.values())]
    return ProbeBank(torch.cat(weights).to(device), torch.cat(biases).to(device), dict(layers), columns)


def _load(path: Path, layer: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            written_for = (file.metadata() or {}).get("layer", str(layer))
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ProbeFileError(f"probe {path}: {error}") from error
    if written_for != str(layer):
        raise ProbeFileError(f"probe {path} was trained on layer {written_for}, not {layer}")
    weight, bias = tensors.get("weight"), tensors.get("bias")
    fits = weight is not None and weight.ndim == 2 and weight.shape[1] == hidden_size
    if weight is None or bias is None or not fits or bias.shape != weight.shape[:1]:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ProbeFileError(f"probe {path} must hold weight [outputs, {hidden_size}] and bias [outputs], not {shapes}")
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise ProbeFileError(f"probe {path} has values that are not finite")
    return weight, bias
