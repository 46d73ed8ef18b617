"""The file that lists the models that other providers serve (setting ``providers``).

Owns its format. Reading it asks nobody, and needs neither keys nor litellm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from guard.policy.conditions import Section, Version
from guard.policy.yaml_file import PolicyError, read_mapping, validated
from guard.settings import SettingsError


class ProviderModel(Section):
    """One model."""

    model: Annotated[str, Field(min_length=3, pattern=r"^[^/\s]+/\S+$", examples=["openai/gpt-4o-mini"])]
    """Its name for litellm: provider, slash, model."""

    api_base: Annotated[str | None, Field(pattern=r"^https?://")] = None
    """Base URL, where it is not the provider's own. Then no other server is asked than this one and `may_ask`."""

    may_ask: Annotated[
        tuple[Annotated[str, Field(pattern=r"^https?://")], ...],
        Field(examples=[["https://login.microsoftonline.com"]]),
    ] = ()
    """Other servers that may be asked where `api_base` is set, such as one that gives out tokens."""

    api_key_env: Annotated[str | None, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", examples=["OPENAI_API_KEY"])] = None
    """The environment variable that has the provider's key. Without it litellm looks where it does for the provider."""

    @property
    def provider(self) -> str:
        """litellm's name for who serves it."""
        return self.model.partition("/")[0]


class ProvidersFile(Section):
    """The file of the setting `providers`."""

    version: Version
    """Version of this format."""

    models: Annotated[dict[str, ProviderModel], Field(min_length=1)]
    """Models by the name that clients ask for."""


def read_providers(path: Path) -> dict[str, ProviderModel]:
    """Models by name. Raises ``SettingsError``, with file, line and field."""
    try:
        return dict(validated(read_mapping(path), ProvidersFile).models)
    except PolicyError as error:
        raise SettingsError(str(error)) from None
