"""Pages of the site that aren't files of docs/, which MkDocs calls while it builds the site.

README.md is the first page; CHANGELOG.md, CONTRIBUTING.md and the tables of benchmarks are pages,
and so is each file of the repository to which a page links. Keys, components, recipes and classes
are described from the code. docs/README.md gives the order of pages.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from pipeline.cli.commands.key_descriptions import describe_type, read_schema
from pipeline.config.files import find_recipes
from pipeline.core.registry import load_all

ROOT = Path(__file__).parents[2]
HOME = "index.md"
OUTER_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Places of files outside of docs/, but README.md and the results of benchmarks."""
RESULTS = "benchmarks/results/"
LINK = re.compile(
    r"(\]\(|^\[[^\]]+\]: )(?!https?:|#|mailto:)([^)\s#]+)((?:#[^)\s]*)?(?:\)|$))", re.MULTILINE
)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
"""Languages of code blocks by suffix."""
API = {
    "pipeline.config.compose": ("load_recipe",),
    "pipeline.api.trainer": ("run", "Trainer"),
    "pipeline.api.loaded_run": ("load_run", "LoadedRun"),
    "pipeline.engine.sink": ("sink",),
    "pipeline.engine.callbacks.callback": ("Callback", "RunControl"),
    "pipeline.training.step_feature": ("StepFeature",),
    "pipeline.stages.runner.run_feature": ("RunFeature",),
}
"""Public names by the modules that define them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the order of pages."""
    sections: dict[str, list[Any]] = {}
    index = (ROOT / "docs/README.md").read_text("utf-8")
    for heading, name in re.findall(r"^\*\*(.+)\*\*$|^\* \[([\w.-]+\.md)\]", index, re.MULTILINE):
        if heading:
            sections[heading] = []
        else:
            sections[list(sections)[-1]].append(name)
    listed = {"README.md", *(name for names in sections.values() for name in names)}
    others = sorted({file.name for file in (ROOT / "docs").glob("*.md")} - listed)
    sections["Reference"] = list(REFERENCE)
    sections["The project"] = [*others, *OUTER_PAGES.values()]
    sections["Measurements"] = [_place(source) for source in _list_results()]
    sections["Files"] = [_place(source) for source in _list_files(_read_texts())]
    config.nav = [{"Home": HOME}, *({title: names} for title, names in sections.items() if names)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace docs/README.md, the order of pages, by README.md, and add the other pages."""
    index = files.get_file_from_path("README.md")
    assert index is not None
    files.remove(index)
    texts = _read_texts()
    for source, text in texts.items():
        if not source.startswith("docs/"):
            files.append(File.generated(config, _place(source), content=_move_links(text, source)))
    for source in _list_files(texts):
        files.append(File.generated(config, _place(source), content=show_source(source)))
    for place, make in REFERENCE.items():
        files.append(File.generated(config, place, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change the links of a file in docs/ that lead to other folders."""
    is_file = page.file.generated_by is None
    return _move_links(markdown, f"docs/{page.file.src_uri}") if is_file else markdown


def _list_results() -> list[str]:
    return [f"{RESULTS}{file.name}" for file in sorted((ROOT / RESULTS).glob("*.md"))]


def _read_texts() -> dict[str, str]:
    """Return the files of the repository that are pages, by their paths from the root."""
    documents = [f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))]
    sources = ["README.md", *OUTER_PAGES, *_list_results(), *documents]
    return {source: (ROOT / source).read_text("utf-8") for source in sources}


def _list_files(texts: Mapping[str, str]) -> list[str]:
    """Return the files and folders that pages link to, and that are not pages or files of docs/."""
    targets = {target for source, text in texts.items() for target in _list_targets(text, source)}
    return sorted(target for target in targets - set(texts) if not target.startswith("docs/"))


def _place(source: str) -> str:
    """Return the page of a file or folder of the repository, as a path in the site."""
    if source in ("README.md", "docs/README.md"):
        return HOME
    if source in OUTER_PAGES:
        return OUTER_PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    if source.startswith(RESULTS):
        return f"results/{source.removeprefix(RESULTS)}"
    return f"source/{source}.md"


def _list_targets(text: str, source: str) -> Iterator[str]:
    """Yield the files and folders, from the root, to which a page links."""
    for link in LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))


def _move_links(text: str, source: str) -> str:
    """Return a file's text with links that are right at the place of its page."""
    folder = posixpath.dirname(_place(source)) or "."

    def move(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        return f"{link[1]}{posixpath.relpath(_place(target), folder)}{link[3]}"

    return LINK.sub(move, text)


def show_source(source: str) -> str:
    """Return a page with a file as a block of code, or with all files of a folder."""
    path = ROOT / source
    files = [path] if path.is_file() else sorted(path.rglob("*.*"))
    parts = [f"# {source}"]
    for file in files:
        if "__pycache__" not in file.parts and file.is_file():
            name = file.relative_to(ROOT).as_posix()
            heading = f"## {name}\n\n" if name != source else ""
            language = LANGUAGES.get(file.suffix, "text")
            parts.append(f"{heading}````{language}\n{file.read_text('utf-8')}\n````")
    return "\n\n".join(parts)


@cache
def _read_schema() -> Mapping[str, Any]:
    load_all()
    return read_schema()


def describe_keys() -> str:
    """Return a page with the keys of every recipe by section: type, default and meaning."""
    schema = _read_schema()
    parts = ["# Keys of recipes", "`python -m pipeline --help KEY` prints one of these."]
    parts += _describe_section("Recipe", schema)
    for name, node in sorted(schema["$defs"].items()):
        if "properties" in node and "name" not in node["properties"]:
            parts += _describe_section(name, node)
    return "\n\n".join(parts)


def describe_components() -> str:
    """Return a page with all components, by name, and their keys."""
    parts = ["# Components", "What a recipe chooses by name: datasets, map ops, layers and others."]
    for name, node in sorted(_read_schema()["$defs"].items(), key=lambda item: item[0].lower()):
        if "const" in node.get("properties", {}).get("name", {}):
            parts += _describe_section(name, node)
    return "\n\n".join(parts)


def _describe_section(title: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield heading, meaning and table of the keys of a class."""
    schema = _read_schema()
    component = node["properties"].get("name", {}).get("const")
    yield f"## {f'`{component}` ({title})' if component else title}"
    if meaning := node.get("description"):
        yield _escape(meaning)
    rows = []
    for key, value in node["properties"].items():
        if key != "name" or component is None:
            default = _escape(repr(value["default"])) if "default" in value else ""
            kind = _escape(describe_type(value, schema))
            rows.append(
                f"| `{key}` | {kind} | {default} | {_escape(value.get('description', ''))} |"
            )
    if rows:
        yield "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def _escape(text: str) -> str:
    return re.sub(r"([|<>\[\]*_])", r"\\\1", " ".join(text.split()))


def describe_recipes() -> str:
    """Return a page with the files of all shipped recipes."""
    parts = ["# Shipped recipes", "`python -m pipeline +recipe=NAME` trains one of these."]
    for name, file in find_recipes(ROOT).items():
        parts += [f"## {name}", f"````yaml\n{file.read_text('utf-8')}````"]
    return "\n\n".join(parts)


def describe_classes() -> str:
    """Return a page with the public functions and classes, from their docstrings."""
    names = [f"::: {module}.{name}" for module, names in API.items() for name in names]
    text = "For networks and loops in Python, and for components: [how to write them](%s)."
    return "\n\n".join(["# Classes and functions", text % "../bring-your-own.md", *names])


REFERENCE: Mapping[str, Callable[[], str]] = {
    "reference/keys.md": describe_keys,
    "reference/components.md": describe_components,
    "reference/recipes.md": describe_recipes,
    "reference/api.md": describe_classes,
}
"""Pages that are made from the code."""
