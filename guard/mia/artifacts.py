"""Readouts as files: one tensor file, and one JSON file that is the wire form with each array's name in its place.

Owns both formats and the way back. Knows no folder's limits (``guard.mia.artifact_store``), and never touches vLLM;
torch only for ``pt``. Nothing is unpickled.

    readouts.json           {"object": "mia.readouts", "tensor_file": ..., "readouts": [wire form, {"tensor": NAME}]}
    readouts.safetensors    or readouts.pt, which is one dict for torch.load(weights_only=True)

A tensor's name is PROMPT/CHOICE/STAGE/CAPTURE/FIELD, like ``0/0/prompt/h/values``, with /KEY where the field is a dict.
"""

from __future__ import annotations

import binascii
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from guard.mia.results import EVENT_OBJECT, FloatArray, Readout, Readouts, arrays

FileFormat = Literal["safetensors", "pt"]

JSON_FILE = "readouts.json"
TENSOR_FILES: Mapping[FileFormat, str] = {"safetensors": "readouts.safetensors", "pt": "readouts.pt"}
FILES = frozenset({JSON_FILE, *TENSOR_FILES.values()})
"""Every name that a file of an artifact may have."""

PLACE = re.compile(rb'\{"tensor": "([^"]+)"\}')
"""A tensor's place in the JSON text. No string in it can look like that: its quotes would be escaped."""

CHUNK_BYTES = 3 * 2**18
"""Of a tensor that become base64 at once; a multiple of 3, so that the pieces fit together."""


def encode(readouts: Sequence[Readouts], file_format: FileFormat) -> dict[str, bytes]:
    """The artifact's files by name. Raises ``ValueError`` when two readouts would share a name."""
    tensors: dict[str, FloatArray] = {}
    wires = []
    for one in readouts:
        wire = without_values(one).to_wire()
        for capture, item in one.items.items():
            prefix = f"{one.prompt_index}/{one.choice_index}/{one.stage}/{capture}"
            for field, key, array in arrays(item):
                name = f"{prefix}/{field}" if key is None else f"{prefix}/{field}/{key}"
                if name in tensors:
                    raise ValueError(f"two readouts are named {name}")
                tensors[name] = np.ascontiguousarray(array, dtype="<f4")
                if key is None:
                    wire["items"][capture][field] = {"tensor": name}
                else:
                    wire["items"][capture][field][str(key)] = {"tensor": name}
        wires.append(wire)
    tensor_file = TENSOR_FILES[file_format]
    document = {"object": EVENT_OBJECT, "tensor_file": tensor_file, "readouts": wires}
    return {tensor_file: _encode_tensors(tensors, file_format), JSON_FILE: json.dumps(document).encode()}


def json_with_values(read: Callable[[str], bytes]) -> Iterator[bytes]:
    """The JSON file's text with the arrays in their places, as answers have them, in pieces of about 1 MiB.

    ``read`` gives a file's content by its name. Raises what it raises, ``KeyError`` and ``ValueError`` for other files.
    """
    text = read(JSON_FILE)
    tensors = _decode_tensors(json.loads(text)["tensor_file"], read)
    end = 0
    for place in PLACE.finditer(text):
        array = tensors[place[1].decode()]
        yield text[end : place.start()]
        yield b'{"dtype": "float32", "shape": %s, "data": "' % json.dumps(array.shape).encode()
        raw = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(raw), CHUNK_BYTES):
            yield binascii.b2a_base64(raw[start : start + CHUNK_BYTES], newline=False)
        yield b'"}'
        end = place.end()
    yield text[end:]


def load_artifact(folder: Path) -> list[Readouts]:
    """Readouts of one artifact, as written. Raises ``OSError``, and ``KeyError`` or ``ValueError`` for other files."""
    document = json.loads(b"".join(json_with_values(lambda name: (folder / name).read_bytes())))
    return [Readouts.from_wire(wire) for wire in document["readouts"]]


def without_values(readouts: Readouts) -> Readouts:
    """All but the arrays: status, positions, token ids."""
    return replace(readouts, items={name: _without_arrays(item) for name, item in readouts.items.items()})


def dropped(readouts: Readouts, reason: str) -> Readouts:
    """Without arrays, and every readout that was complete is now ``dropped``."""
    return replace(
        readouts,
        items={
            name: replace(item, status="dropped", reason=reason) if item.status == "complete" else item
            for name, item in without_values(readouts).items.items()
        },
    )


def _without_arrays(item: Readout) -> Readout:
    changes: dict[str, Any] = {field: None if key is None else {} for field, key, _ in arrays(item)}
    return replace(item, **changes)


def _encode_tensors(tensors: dict[str, FloatArray], file_format: FileFormat) -> bytes:
    if file_format == "safetensors":
        return safetensors.numpy.save(tensors)
    import torch

    buffer = io.BytesIO()
    torch.save({name: torch.tensor(array) for name, array in tensors.items()}, buffer)
    return buffer.getvalue()


def _decode_tensors(tensor_file: str, read: Callable[[str], bytes]) -> dict[str, FloatArray]:
    if tensor_file == TENSOR_FILES["safetensors"]:
        return safetensors.numpy.load(read(tensor_file))
    if tensor_file == TENSOR_FILES["pt"]:
        import torch

        tensors = torch.load(io.BytesIO(read(tensor_file)), map_location="cpu", weights_only=True)
        return {name: tensor.numpy() for name, tensor in tensors.items()}
    raise ValueError(f"{tensor_file!r} is no tensor file")
