"""Files at an address, in a local folder and on a local server of HTTP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, RunError
from pipeline.core.files import storage
from pipeline.core.files.storage import StoredFile, convert_errors, open_storage, retry


def test_folder_can_be_listed_read_written_and_removed(tmp_path: Path) -> None:
    stored = open_storage(f"file://{tmp_path}/store")
    assert stored.list_files() == {}
    stored.write("a/one", b"first")
    (tmp_path / "two").write_bytes(b"second")
    stored.upload(tmp_path / "two", "b/two")
    assert {name: file.size_bytes for name, file in stored.list_files().items()} == {
        "a/one": 5,
        "b/two": 6,
    }
    assert stored.read("a/one", 100) == b"first"
    assert stored.read("a/one", 2) == b"fi"
    assert stored.read("a/none", 2) is None
    stored.download("b/two", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"second"
    stored.remove("a")
    stored.remove("a")
    assert list(stored.list_files()) == ["b/two"]
    single = open_storage(f"file://{tmp_path}/store/b/two")
    assert single.is_file()
    assert not stored.is_file()
    assert single.describe() == stored.list_files()["b/two"]
    assert list(single.list_files()) == [""]


def test_network_error_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = open_storage(f"file://{tmp_path}/x")
    assert not stored.is_file()

    def fail(path: str) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(stored.system, "info", fail)
    with pytest.raises(RunError, match="x: can't be read: reset by peer"):
        stored.is_file()


def test_version_changes_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    before = open_storage(f"file://{tmp_path}").list_files()["x"]
    assert before == StoredFile(1, before.version)
    (tmp_path / "x").write_bytes(b"2")
    assert open_storage(f"file://{tmp_path}").list_files()["x"] != before


class HttpError(Exception):
    """An error of a library, with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, url='https://host/x?X-Amz-Signature=s3ntinel'")
        self.status = status


class NoCredentialsError(Exception):
    """botocore's error, which has no common type."""


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ImportError("Install s3fs"), DataError, "s3://b/x: needs another package: pip install"),
        (PermissionError("Access Denied"), DataError, "credentials are missing or refused: Access"),
        (NoCredentialsError("Unable"), DataError, "the credentials are missing or refused: Unable"),
        (HttpError(403), DataError, "the credentials are missing or refused: 403"),
        (HttpError(500), RunError, "s3://b/x: can't be read: 500, url="),
        (FileNotFoundError("x"), DataError, "there is no such file, folder or bucket"),
        (OSError(28, "No space left on device"), RunError, "can't be read: No space left"),
        (TimeoutError(), RunError, "can't be read: TimeoutError"),
    ],
)
def test_errors_have_one_line_without_secrets(error: Exception, kind: Any, text: str) -> None:
    with pytest.raises(kind) as raised, convert_errors("s3://b/x", "can't be read"):
        raise error
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "s3ntinel" not in str(raised.value)


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (ConnectionRefusedError(111, "Connection refused"), RunError, "read: Connection refused"),
        (HttpError(401), DataError, "credentials are missing or refused"),
        (HttpError(404), DataError, "there is no such file"),
    ],
)
def test_failed_http_request_is_not_reported_as_missing_file(
    cause: Exception, kind: Any, text: str
) -> None:
    """fsspec raises FileNotFoundError for all failed requests of HTTP."""
    with pytest.raises(kind, match=text), convert_errors("https://host/x", "can't be read"):
        raise FileNotFoundError("https://host/x") from cause


def test_action_is_retried_unless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAITS_S", (0.0, 0.0))
    errors: list[Exception] = [RunError("one"), RunError("two")]

    def act() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    assert retry(act) == "done"
    errors += [RunError("one"), RunError("two"), RunError("three")]
    with pytest.raises(RunError, match="three"):
        retry(act)
    errors += [DataError("refused"), RunError("not raised")]
    with pytest.raises(DataError, match="refused"):
        retry(act)
    assert len(errors) == 1


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_missing_package_is_named_with_install_command() -> None:
    with pytest.raises(DataError, match=r"pip install 'recipe-pipeline\[storage\]'"):
        open_storage("s3://bucket/x")
