"""The JSON schema of a request's spec, for tools that write or check one: ``python -m guard.mia.schema``.

The same that ``GET /v1/mia/capabilities`` gives of the running engine.
"""

from __future__ import annotations

import json

from guard.mia.spec import MiaSpec

if __name__ == "__main__":
    print(json.dumps(MiaSpec.model_json_schema(), indent=2))
