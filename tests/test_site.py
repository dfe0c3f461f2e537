"""The documents as a site, and the commands of the page for those who come from other trainers."""

from __future__ import annotations

import html
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pipeline import load_recipe
from pipeline.cli.commands.key_descriptions import find_key
from pipeline.config.files import find_recipes
from pipeline.core.registry import list_components, load_all

ROOT = Path(__file__).parents[1]
COMING_FROM = (ROOT / "docs/coming-from.md").read_text("utf-8")
COMMANDS = re.findall(r"^    python -m pipeline (.+)$", COMING_FROM, re.MULTILINE)


def test_each_trainer_has_an_example() -> None:
    trainers = re.findall(r"^## (.+)$", COMING_FROM, re.MULTILINE)
    assert trainers == ["Keras", "Lightning", "MindSpore", "Hydra", "Ultralytics"]
    assert len(COMMANDS) == len(trainers)


@pytest.mark.medium
def test_keys_beside_the_words_of_others_exist() -> None:
    load_all()
    cells = re.findall(r"^\| .+? \| (.+) \|$", COMING_FROM, re.MULTILINE)
    keys = {key for cell in cells for key in re.findall(r"`([a-z]+(?:\.[a-z_]+)+)[`=]", cell)}
    assert len(keys) > 25
    ours = {key for key in keys if key != "pipeline.sink"}
    assert [key for key in sorted(ours) if key not in find_key(key.split("."))] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_valid_recipes(command: str) -> None:
    recipe, *overrides = [word for word in shlex.split(command) if word != "-m"]
    name = recipe.removeprefix("+recipe=")
    assert load_recipe(name, [key.partition(",")[0] for key in overrides]).name == name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, without a warning about a link, an anchor or a page that is left out."""
    pytest.importorskip("mkdocs", reason="the extra `docs` isn't installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    pages = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages <= {page.stem for page in site.glob("*.html")}
    assert "A JAX training pipeline" in (site / "index.html").read_text("utf-8")


@pytest.mark.slow
def test_reference_has_keys_components_recipes_and_classes(site: Path) -> None:
    texts = {
        page.stem: html.unescape(re.sub("<[^>]+>", "", page.read_text("utf-8")))
        for page in (site / "reference").glob("*.html")
    }
    assert "sink_size" in texts["keys"]
    missing = [name for name in list_components("optimizer") if name not in texts["components"]]
    assert missing == []
    headings = re.findall(r'<h2 id="([^"]+)"', (site / "reference/recipes.html").read_text("utf-8"))
    assert headings == list(find_recipes(ROOT))
    assert "StepFeature" in texts["api"]
    assert "change_gradients" in texts["api"]


@pytest.mark.slow
def test_site_has_no_file_of_its_making(site: Path) -> None:
    assert list(site.rglob("*.py")) == []
    ET.parse(site / "sitemap.xml")
