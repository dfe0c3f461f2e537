"""A bill of materials in SPDX 2.3 of a wheel, its data files and the locked packages.

    python -m tests.bill_of_materials dist/*.whl --out dist/bill.spdx.json

Licences of files are from docs/licences.md, and licences of packages from their metadata, so that
the packages of pylock.toml must be installed. A file or package without a licence is an error.
The same wheel and environment give the same bytes. Needs the extra `release`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.message import Message
from email.parser import Parser
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/licences.md"
ROW = re.compile(r"^\| `([^|]+)` \| ([^|]+) \| `([^|`]+)` \|$", re.MULTILINE)
DATA_SUFFIXES = (
    ".ckpt", ".csv", ".data-00000-of-00001", ".h5", ".index", ".json", ".jsonl", ".keras", ".npy",
    ".npz", ".onnx", ".pb", ".pt", ".pth", ".safetensors", ".tar", ".tfrecord", ".txt",
    ".wav", ".zip",
)  # fmt: skip
"""Suffixes of files that hold data, which docs/licences.md must list. All others are code."""
SPELLINGS: Mapping[str, str] = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
"""SPDX's identifiers of the licences that metadata before PEP 639 spell otherwise."""
IDENTIFIER = re.compile(r"[A-Za-z]+-[\w.-]+|MIT|ISC|Unlicense|Zlib|0BSD")


def main() -> int:
    """Write the bill; return the exit status: 1 for a missing licence or an invalid bill."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bill.spdx.json"), metavar="FILE")
    given = parser.parse_args()
    try:
        document = make_bill(given.wheel, tomllib.loads((ROOT / "pylock.toml").read_text("utf-8")))
        problems = write_bill(document, given.out)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        problems = [str(error)]
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{given.out}: {len(document.packages)} packages, {len(document.files)} data files")
    return 1 if problems else 0


def read_licences() -> dict[str, str]:
    """Return the licences of data files by their patterns, from docs/licences.md."""
    return {pattern: licence for pattern, _, licence in ROW.findall(TABLE.read_text("utf-8"))}


def list_data_files(names: Iterable[str]) -> list[str]:
    """Return the names of files that hold data, without this package's metadata."""
    return sorted(n for n in names if n.endswith(DATA_SUFFIXES) and ".dist-info/" not in n)


def find_licence(name: str, licences: Mapping[str, str]) -> str:
    """Return the licence of a data file; raise a ValueError unless one row is its own."""
    rows = [pattern for pattern in licences if fnmatchcase(name, pattern)]
    if len(rows) != 1:
        raise ValueError(f"{name}: docs/licences.md has {len(rows)} rows for it, must be 1")
    return licences[rows[0]]


def find_package_licence(metadata: Message) -> str:
    """Return the licence of a package as an SPDX expression; raise a ValueError if it has none."""
    if expression := metadata.get("License-Expression"):
        return expression
    classifiers = [text for text in metadata.get_all("Classifier") or [] if "License ::" in text]
    stated = (metadata.get("License") or "").strip()
    choices = [stated.splitlines()[0].strip()] if stated else []
    choices += [text.rpartition(" :: ")[2] for text in classifiers]
    for text in choices:
        if found := SPELLINGS.get(text.lower()):
            return found
        words = re.split(r" (?:AND|OR) ", text)
        if all(IDENTIFIER.fullmatch(word) for word in words):
            return text
    raise ValueError(f"{metadata['Name']}: its metadata names no licence of SPDX: {choices}")


def find_closure(requirements: Sequence[str]) -> set[str]:
    """Return the names of installed packages that requirements without extras lead to."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        extras = [*requirement.extras, ""]
        marker = requirement.marker
        name = canonicalize_name(requirement.name)
        if name in found or (marker and not any(marker.evaluate({"extra": e}) for e in extras)):
            continue
        found.add(name)
        waiting += distribution(name).requires or ()
    return found


def make_bill(wheel: Path, lock: Mapping[str, Any]) -> Any:
    """Return the SPDX document of a wheel and the packages of the lock file."""
    from spdx_tools.spdx import model

    content = wheel.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (place,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(place).decode("utf-8"))
        files = list(_describe_files(archive))
    own = _describe_package(metadata, digest, wheel.name)
    needed = find_closure(metadata.get_all("Requires-Dist") or [])
    packages, relations = [own], [("SPDXRef-DOCUMENT", "DESCRIBES", own.spdx_id)]
    for locked in lock["packages"]:
        package = _describe_package(_find_metadata(locked["name"]), _find_digest(locked), None)
        package.version = locked["version"]
        packages.append(package)
        is_needed = canonicalize_name(locked["name"]) in needed
        relations.append(
            (own.spdx_id, "DEPENDS_ON", package.spdx_id)
            if is_needed
            else (package.spdx_id, "OPTIONAL_DEPENDENCY_OF", own.spdx_id)
        )
    relations += [(file.spdx_id, "DATA_FILE_OF", own.spdx_id) for file in files]
    info = model.CreationInfo(
        spdx_version="SPDX-2.3",
        spdx_id="SPDXRef-DOCUMENT",
        name=f"{own.name}-{own.version}",
        document_namespace=f"https://spdx.org/spdxdocs/{own.name}-{own.version}-{digest[:32]}",
        creators=[model.Actor(model.ActorType.TOOL, "tests.bill_of_materials")],
        created=_find_time(),
    )
    return model.Document(
        creation_info=info,
        packages=packages,
        files=files,
        relationships=[
            model.Relationship(left, model.RelationshipType[kind], right)
            for left, kind, right in relations
        ],
    )


def write_bill(document: Any, path: Path) -> list[str]:
    """Write a document if it is valid; return the problems that spdx-tools' validator finds."""
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
    from spdx_tools.spdx.writer.json.json_writer import write_document_to_file

    problems = [each.validation_message for each in validate_full_spdx_document(document)]
    if not problems:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_document_to_file(document, str(path), validate=False)
    return problems


def _find_metadata(name: str) -> Message:
    try:
        return distribution(name).metadata  # type: ignore[return-value]
    except PackageNotFoundError:
        raise ValueError(f"{name}: pylock.toml has it, but it isn't installed") from None


def _find_digest(locked: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a locked package's first file."""
    files = [*locked.get("wheels", ()), *([locked["sdist"]] if "sdist" in locked else ())]
    return str(files[0]["hashes"]["sha256"])


def _find_time() -> datetime:
    """Return the time of the last commit, so that a second bill has the same bytes."""
    command = ["git", "log", "-1", "--format=%ct"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return datetime.fromtimestamp(int(ended.stdout or 0), UTC).replace(tzinfo=None)


def _describe_package(metadata: Message, digest: str, file: str | None) -> Any:
    """Return a package: name, version, licence, address and SHA-256 of its file."""
    from license_expression import get_spdx_licensing
    from spdx_tools.spdx import model

    name = canonicalize_name(metadata["Name"])
    licence = get_spdx_licensing().parse(find_package_licence(metadata), validate=True)
    address = f"pkg:pypi/{name}@{metadata['Version']}"
    return model.Package(
        spdx_id=f"SPDXRef-Package-{name}",
        name=name,
        version=metadata["Version"],
        file_name=file,
        download_location=model.SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[model.Checksum(model.ChecksumAlgorithm.SHA256, digest)],
        license_declared=licence,
        license_concluded=model.SpdxNoAssertion(),
        copyright_text=model.SpdxNoAssertion(),
        external_references=[
            model.ExternalPackageRef(
                model.ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", address
            )
        ],
    )


def _describe_files(archive: zipfile.ZipFile) -> Iterator[Any]:
    """Yield the data files of a wheel with their SHA-1, which SPDX wants, SHA-256 and licence."""
    from license_expression import get_spdx_licensing
    from spdx_tools.spdx import model

    licences = read_licences()
    for number, name in enumerate(list_data_files(archive.namelist()), 1):
        content = archive.read(name)
        licence = get_spdx_licensing().parse(find_licence(name, licences), validate=True)
        yield model.File(
            name=f"./{name}",
            spdx_id=f"SPDXRef-File-{number}",
            checksums=[
                model.Checksum(model.ChecksumAlgorithm.SHA1, hashlib.sha1(content).hexdigest()),
                model.Checksum(model.ChecksumAlgorithm.SHA256, hashlib.sha256(content).hexdigest()),
            ],
            license_concluded=licence,
            license_info_in_file=[model.SpdxNoAssertion()],
            copyright_text=model.SpdxNoAssertion(),
        )


if __name__ == "__main__":
    sys.exit(main())
