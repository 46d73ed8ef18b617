"""The console's page, scripts and styles, and the headers that keep a browser from running anything else.

Owns which files there are: those of the folder ``static`` when the process starts. No path of a client's is opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'none'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing inline, nothing from elsewhere, in no frame; and no text can become markup (trusted types): prompts are
hostile."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class StaticFile:
    body: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**HEADERS, "etag": self.etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


def static_files() -> dict[str, StaticFile]:
    """By name."""
    found = sorted(file for file in FOLDER.iterdir() if file.suffix in MEDIA_TYPES)
    return {file.name: _read(file) for file in found}


def _read(file: Path) -> StaticFile:
    body = file.read_bytes()
    return StaticFile(body, MEDIA_TYPES[file.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
