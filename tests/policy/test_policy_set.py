"""A folder of policies is one whole: every file fits, and the selection names what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guard.policy import BoundPolicy, LoadedPolicy, PolicyError, bind
from guard.policy.policy_set import load_policies
from guard.policy.selection import RequestFacts
from tests.policy.test_bound import Fake

ONE = """\
version: 1
name: {name}
detectors:
  d: {{kind: fake}}
rules:
  - {{name: stop, when: {{detector: d, at_least: {at}}}, action: block}}
"""
SELECTION = """\
version: 1
default: base
shadow: candidate
assignments:
  - {name: acme, match: {models: ["llama*"]}, policy: strict}
"""
FACTS = RequestFacts("r-1", "/v1/chat/completions", "tiny")


def policy(name: str, at: float = 0.5) -> str:
    return ONE.format(name=name, at=at)


def bind_fakes(loaded: LoadedPolicy) -> BoundPolicy:
    return bind(loaded, {name: Fake() for name in loaded.policy.detectors})


def folder(path: Path, selection: str | None = SELECTION, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in (files or {name: policy(name) for name in ("base", "strict", "candidate")}).items():
        (path / f"{name}.yaml").write_text(text)
    if selection is not None:
        (path / "selection.yaml").write_text(selection)
    return path


def test_the_selection_says_which_policies_judge_a_request(tmp_path: Path) -> None:
    found = load_policies(folder(tmp_path / "p"), bind_fakes)
    judges, assignment = found.choose(FACTS)
    assert (judges.live.name, judges.shadow and judges.shadow.name, assignment) == ("base", "candidate", None)
    judges, assignment = found.choose(RequestFacts("r-1", "/v1/chat/completions", "llama-3"))
    assert (judges.live.name, assignment) == ("strict", "acme")
    assert {one.name for one in found.policies} == {"base", "strict", "candidate"}
    assert found.default.live.name == "base"


def test_a_single_file_is_a_set_of_one(tmp_path: Path) -> None:
    path = folder(tmp_path / "p", None) / "base.yaml"
    found = load_policies(path, bind_fakes)
    assert found.choose(FACTS)[0].live.name == "base"
    assert found.hash == found.default.live.hash


def test_a_folder_of_one_policy_needs_no_selection_and_files_that_are_none_are_left_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "p", None, base=policy("base"))
    (path / "base.tests.yaml").write_text("not: a policy")
    (path / ".#base.yaml").write_text("{")
    (path / "notes.txt").write_text("{")
    assert load_policies(path, bind_fakes).default.live.name == "base"


@pytest.mark.parametrize(
    ("selection", "files", "message"),
    [
        (SELECTION.replace("base", "bass"), {}, "selection.yaml: no policy is called 'bass'; there are: base"),
        (SELECTION.replace("default", "defoult"), {}, "selection.yaml:2: defoult"),
        (None, {}, "has 3 policies and no selection.yaml"),
        (SELECTION, {"base": policy("base"), "again": policy("base")}, "base.yaml:2: name: again.yaml has a policy"),
        ("version: 1\ndefault: base\n", {"base": policy("base"), "broken": "name: x"}, "broken.yaml:1: version"),
    ],
)
def test_a_folder_with_a_mistake_is_refused_as_a_whole(
    tmp_path: Path, selection: str | None, files: dict[str, str], message: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policies(folder(tmp_path / "p", selection, **files), bind_fakes)
    assert message in str(caught.value)


def test_a_policy_that_nothing_selects_is_checked_but_needs_no_calibration(tmp_path: Path) -> None:
    def only_base(loaded: LoadedPolicy) -> BoundPolicy:
        assert loaded.policy.name == "base"
        return bind_fakes(loaded)

    path = folder(tmp_path / "p", "version: 1\ndefault: base\n", base=policy("base"), other=policy("other"))
    assert [one.name for one in load_policies(path, only_base).policies] == ["base"]


def test_the_version_hash_changes_with_any_policy_and_with_the_selection_and_not_with_spelling(tmp_path: Path) -> None:
    path = folder(tmp_path / "p")
    hashes = [load_policies(path, bind_fakes).hash]
    for file, old, new in (("strict", "0.5", "0.6"), ("selection", "llama*", "qwen*"), ("base", "0.5", "0.50")):
        text = (path / f"{file}.yaml").read_text()
        (path / f"{file}.yaml").write_text(text.replace(old, new) + "# note\n")
        hashes.append(load_policies(path, bind_fakes).hash)
    assert len(set(hashes)) == 3
    assert hashes[2] == hashes[3]


def configmap(path: Path, version: str, files: dict[str, str]) -> None:
    """Files as Kubernetes mounts them, and swapped as it swaps them."""
    path.mkdir(exist_ok=True)
    data = path / f"..{version}"
    data.mkdir()
    for name, text in files.items():
        (data / name).write_text(text)
        if not (path / name).is_symlink():
            (path / name).symlink_to(f"..data/{name}")
    (path / "..data_tmp").symlink_to(data.name)
    os.replace(path / "..data_tmp", path / "..data")


def test_a_configmap_is_read_from_the_version_that_is_there_now_folder_or_file(tmp_path: Path) -> None:
    path = tmp_path / "mounted"
    for version, at in (("v1", 0.5), ("v2", 0.6)):
        configmap(path, version, {"base.yaml": policy("base", at)})
        for mounted in (path, path / "base.yaml"):
            found = load_policies(mounted, bind_fakes)
            assert {file.parent.name for file in found.files} == {f"..{version}"}
            assert found.default.live.rules[0].rule.when.at_least == at  # type: ignore[union-attr]
