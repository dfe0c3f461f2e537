"""The wheel: what it holds beside the code, and that its code is that of the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import pipeline
from pipeline.stages.record.provenance import describe_code
from tests import release
from tests.bill_of_materials import (
    find_licence,
    find_package_licence,
    list_data_files,
    make_bill,
    read_licences,
    write_bill,
)
from tests.release import build

ROOT = Path(__file__).parents[1]


def test_package_is_typed() -> None:
    assert Path(pipeline.__file__).with_name("py.typed").read_bytes() == b""


@pytest.mark.slow
def test_distributions_of_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its commits builds no release")
    first, second = (build(tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert {name.rpartition(".")[2] for name in first} == {"gz", "whl"}


@pytest.mark.slow
def test_wheel_has_types_conf_recipes_and_the_lock(tmp_path: Path) -> None:
    # The builder itself: pip would download one.
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    package = tmp_path / "pipeline"
    assert (package / "py.typed").read_bytes() == b""
    for name in ("pylock.toml", "conf/config.yaml", "recipes/lenet5_digits.yaml"):
        assert (package / name).read_bytes() == (ROOT / name).read_bytes()
    assert (package / "examples" / "project" / "components.py").exists()
    assert describe_code(package)["sha256"] == describe_code()["sha256"]

    # The installed command looks for these files beside its modules.
    check = "from pipeline.core.files.paths import *; print(PACKAGE, CONF, LOCK, LOCK.exists())"
    printed = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split() == [
        *(str(package / name) for name in ("", "conf", "pylock.toml")),
        "True",
    ]


def test_every_data_file_has_one_licence() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its commits has other files beside")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    names = list_data_files(listed.splitlines())
    assert len(names) > 100
    licences = read_licences()
    assert {find_licence(name, licences) for name in names} == set(licences.values())


def test_data_file_has_the_licence_of_its_only_row() -> None:
    licences = read_licences()
    assert find_licence("pipeline/data/sources/digits.npz", licences) == "CC-BY-4.0"
    with pytest.raises(ValueError, match=r"faces\.npz: docs/licences\.md has 0 rows for it"):
        find_licence("pipeline/data/sources/faces.npz", licences)
    with pytest.raises(ValueError, match=r"a\.txt: docs/licences\.md has 2 rows for it"):
        find_licence("a.txt", {"*.txt": "MIT", "a*": "ISC"})


def test_licence_of_the_distribution_names_each_of_its_data() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["license"].split(" AND ")) == set(read_licences().values())


def test_licence_of_a_package_is_an_expression_or_an_error() -> None:
    package = Message()
    package["Name"] = "mystery"
    with pytest.raises(ValueError, match="mystery: its metadata names no licence of SPDX"):
        find_package_licence(package)
    package["License"] = "ask us"
    with pytest.raises(ValueError, match="ask us"):
        find_package_licence(package)
    package["Classifier"] = "License :: OSI Approved :: MIT License"
    assert find_package_licence(package) == "MIT"
    package["License-Expression"] = "BSD-3-Clause OR MIT"
    assert find_package_licence(package) == "BSD-3-Clause OR MIT"


@pytest.mark.slow
def test_bill_of_materials_is_valid_and_has_each_locked_package(tmp_path: Path) -> None:
    pytest.importorskip("spdx_tools", reason="the extra `release` isn't installed")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    lock = tomllib.loads((ROOT / "pylock.toml").read_text("utf-8"))
    texts = []
    for name in ("first", "second"):
        document = make_bill(wheel, lock)
        assert write_bill(document, tmp_path / name / "bill.json") == []
        texts.append((tmp_path / name / "bill.json").read_text("utf-8"))
    assert texts[0] == texts[1]
    bill = json.loads(texts[0])
    assert bill["spdxVersion"] == "SPDX-2.3"
    packages = {package["name"]: package for package in bill["packages"]}
    assert set(packages) == {"recipe-pipeline", *(each["name"] for each in lock["packages"])}
    assert "NOASSERTION" not in {each["licenseDeclared"] for each in bill["packages"]}
    files = {file["fileName"]: file["licenseConcluded"] for file in bill["files"]}
    assert files["./pipeline/data/sources/digits.npz"] == "CC-BY-4.0"
    kinds = {
        each["relatedSpdxElement"]: each["relationshipType"]
        for each in bill["relationships"]
        if each["spdxElementId"] == "SPDXRef-Package-recipe-pipeline"
    }
    assert kinds["SPDXRef-Package-jax"] == "DEPENDS_ON"
    assert "SPDXRef-Package-pytest" not in kinds

    document.packages[1].spdx_id = "no identifier"
    assert write_bill(document, tmp_path / "invalid.json") != []
    assert not (tmp_path / "invalid.json").exists()


def test_changelog_of_the_release_is_short() -> None:
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    first, *sections = text.split("\n## ")[1:]
    assert first.startswith("Unreleased")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    (section,) = (each for each in sections if each.startswith(f"{version}\n"))
    assert len(section.splitlines()) <= 60


def test_each_extra_is_resolved_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[tuple[str, str]] = []

    def resolve(version: str, extra: str, settings: Path) -> str:
        assert "max-age" in settings.read_text()
        resolved.append((version, extra))
        return "no such package" if (version, extra) == ("3.14", "torch") else ""

    monkeypatch.setattr(release, "resolve", resolve)
    problems = [problem for problem in release.check_extras(release.RESOLVED_VERSIONS) if problem]
    assert problems == ["no such package"]
    assert {version for version, _ in resolved} == {"3.11", "3.12", "3.13", "3.14"}
    assert {"audio", "gpu", "release", "sweep"} < {extra for _, extra in resolved}
