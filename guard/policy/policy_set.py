"""All policies of one proxy at one moment: the files of a folder, bound, and the selection between them.

Owns which files of a folder count, and a snapshot that does not change. A request takes one and keeps it to its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from guard.policy.bound import BoundPolicy
from guard.policy.judges import Judges, TooMuchError, judges
from guard.policy.loading import LoadedPolicy, load_policy
from guard.policy.selection import RequestFacts, Selection, choose
from guard.policy.yaml_file import PolicyError, read_mapping, validated

SELECTION_FILE = "selection.yaml"
TESTS_SUFFIX = ".tests.yaml"
CONFIGMAP_LINK = "..data"
"""Kubernetes mounts a ConfigMap as links into a folder that this link names, and swaps the link alone."""

Bind = Callable[[LoadedPolicy], BoundPolicy]


@dataclass(frozen=True)
class PolicySet:
    """``by_pair``: judges by name of the live policy and of its shadow. ``hash``: SHA-256 of everything that was said.

    ``files``: all that were read, for watching.
    """

    selection: Selection
    by_pair: Mapping[tuple[str, str | None], Judges]
    hash: str
    files: tuple[Path, ...]

    @property
    def default(self) -> Judges:
        """For requests that no assignment takes, and those that are refused before one could."""
        return self.by_pair[self.selection.default, self.selection.shadow]

    @property
    def policies(self) -> tuple[BoundPolicy, ...]:
        """Every policy that may judge, live or as a shadow."""
        found = [one for both in self.by_pair.values() for one in (both.live, both.shadow) if one is not None]
        return tuple({one.name: one for one in found}.values())

    def computed_by(self, probes: Collection[str]) -> PolicySet:
        """The same, whose detectors have an engine multiply that was started with ``probes``, by name, where it can.
        Raises ``TooMuchError``."""
        bound = {one.name: one.computed_by(probes) for one in self.policies}
        pairs = {
            (live, shadow): judges(bound[live], bound[shadow] if shadow is not None else None)
            for live, shadow in self.by_pair
        }
        return replace(self, by_pair=pairs)

    def choose(self, facts: RequestFacts) -> tuple[Judges, str | None]:
        """The policies for one request, and the assignment that chose them."""
        choice = choose(self.selection, facts)
        return self.by_pair[choice.policy, choice.shadow], choice.assignment


def load_policies(path: Path, bind_policy: Bind) -> PolicySet:
    """One policy file, or a folder of them. Every file is checked; policies that nothing selects are not bound.

    Raises ``PolicyError``.
    """
    if not path.is_dir():
        return load_single(path, bind_policy)
    folder = read_folder(path)
    content = "\n".join([folder.selection.model_dump_json(), *sorted(one.hash for one in folder.policies.values())])
    return PolicySet(
        folder.selection, _pairs(folder, bind_policy), hashlib.sha256(content.encode()).hexdigest(), folder.files
    )


@dataclass(frozen=True)
class Folder:
    """What the files of a folder say, each checked, before anything is bound to a model."""

    selection: Selection
    policies: Mapping[str, LoadedPolicy]
    selection_file: Path

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.selection_file, *(file for one in self.policies.values() for file in one.files))


def read_folder(path: Path) -> Folder:
    """Raises ``PolicyError``, for a selection of policies that are not there too."""
    folder = pinned(path)
    loaded = _loaded(folder)
    file = folder / SELECTION_FILE
    selection = _selection(file, loaded)
    named = {name for pair in selection.pairs for name in pair if name is not None}
    if unknown := sorted(named - loaded.keys()):
        there = ", ".join(loaded) or "none"
        raise PolicyError(f"{file}: no policy is called {unknown[0]!r}; there are: {there}")
    return Folder(selection, loaded, file)


def selection_at(path: Path) -> Selection:
    """What the policies at a path select, without binding any to a model. Raises ``PolicyError``."""
    if path.is_dir():
        return read_folder(path).selection
    return Selection(version=1, default=load_policy(pinned(path.parent) / path.name).policy.name)


def load_single(path: Path, bind_policy: Bind) -> PolicySet:
    """A set of one policy. Raises ``PolicyError``."""
    loaded = load_policy(pinned(path.parent) / path.name)
    live = bind_policy(loaded)
    selection = Selection(version=1, default=live.name)
    return PolicySet(selection, {(live.name, None): judges(live, None)}, loaded.hash, loaded.files)


def pinned(folder: Path) -> Path:
    """The folder, or what it shows now where it is a mounted ConfigMap: a swap half way cannot mix two versions."""
    link = folder / CONFIGMAP_LINK
    return link.resolve() if link.is_dir() else folder


def policy_files(folder: Path) -> list[Path]:
    """Files of a folder that are policies, sorted by name."""
    names = (*folder.glob("*.yaml"), *folder.glob("*.yml"))
    # Editors put files of their own, which begin with a dot, beside the one they write.
    policies = [file for file in names if file.name != SELECTION_FILE and not file.name.startswith(".")]
    return sorted(file for file in policies if not file.name.endswith(TESTS_SUFFIX) and file.is_file())


def load_selection(path: Path) -> Selection:
    """Raises ``PolicyError``."""
    return validated(read_mapping(path), Selection)


def _loaded(folder: Path) -> dict[str, LoadedPolicy]:
    loaded: dict[str, LoadedPolicy] = {}
    for file in policy_files(folder):
        one = load_policy(file)
        if (other := loaded.get(one.policy.name)) is not None:
            raise one.error(("name",), f"{other.path.name} has a policy of this name already")
        loaded[one.policy.name] = one
    return loaded


def _selection(file: Path, loaded: Mapping[str, LoadedPolicy]) -> Selection:
    if file.is_file():
        return load_selection(file)
    names = list(loaded)
    if len(names) != 1:
        raise PolicyError(
            f"{file.parent}: has {len(names)} policies and no {SELECTION_FILE} to say which of them judges: name "
            "one of the files, or write it"
        )
    return Selection(version=1, default=names[0])


def _pairs(folder: Folder, bind_policy: Bind) -> dict[tuple[str, str | None], Judges]:
    pairs = folder.selection.pairs
    names = sorted({name for pair in pairs for name in pair if name is not None})
    bound = {name: bind_policy(folder.policies[name]) for name in names}
    try:
        return {
            (live, shadow): judges(bound[live], bound[shadow] if shadow is not None else None) for live, shadow in pairs
        }
    except TooMuchError as error:
        raise PolicyError(f"{folder.selection_file}: {error}") from None
