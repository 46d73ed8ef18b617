"""The published schema is the spec's own."""

from __future__ import annotations

import json
import subprocess
import sys

from guard.mia.spec import MiaSpec


def test_the_command_prints_the_schema_of_the_spec() -> None:
    command = [sys.executable, "-m", "guard.mia.schema"]
    printed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert printed == MiaSpec.model_json_schema()
    assert printed["properties"]["deliver"]["enum"] == ["answer", "safetensors", "pt"]
