from __future__ import annotations

import fcntl
import hashlib
import io
import multiprocessing
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.copies import mirror_transfer
from pipeline.data.copies.checksums import RemoteFile
from pipeline.data.copies.download import fetch_all, lock_data_folder

CONTENT = bytes(index * index % 251 for index in range(10_240))
FILE = RemoteFile("data.bin", hashlib.md5(CONTENT).hexdigest())
SENT_BYTES = 4_096
STALL_S = 0.25


def fetch(file: RemoteFile, mirrors: list[str], folder: Path) -> Path:
    fetch_all("mnist", [file], mirrors, folder)
    return folder / file.name


class Server(ThreadingHTTPServer):
    """Serves CONTENT; the first folder of an address says in which way it goes wrong."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None]] = []
        self.closing = threading.Event()

    def mirror(self, kind: str, scheme: str = "http") -> str:
        return f"{scheme}://127.0.0.1:{self.server_port}/{kind}"

    def handle_error(self, *_: object) -> None:
        """A client that gave up is no news here."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        self.server.seen.append((kind, self.headers.get("Range")))
        getattr(self, f"send_{kind}")()

    def start(self) -> int:
        return int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))

    def reply(self, start: int, body: bytes, length: int | None) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def send_good(self) -> None:
        if self.start() >= len(CONTENT):
            self.send_error(416)
        else:
            rest = CONTENT[self.start() :]
            self.reply(self.start(), rest, len(rest))

    def send_late(self) -> None:
        time.sleep(0.2)
        self.send_good()

    def send_unmeasured(self) -> None:
        self.reply(0, CONTENT, None)

    def send_rangeless(self) -> None:
        self.reply(0, CONTENT, len(CONTENT))

    def send_truncated(self) -> None:
        rest = CONTENT[self.start() :]
        self.reply(self.start(), rest[:SENT_BYTES], len(rest))

    def send_truncated_rangeless(self) -> None:
        self.reply(0, CONTENT[:SENT_BYTES], len(CONTENT))

    def send_wrong(self) -> None:
        self.reply(0, CONTENT[::-1], len(CONTENT))

    def send_shifted(self) -> None:
        self.reply(5, CONTENT[5:], len(CONTENT) - 5)

    def send_stalling(self) -> None:
        self.reply(0, CONTENT[:100], len(CONTENT))
        self.server.closing.wait(10)

    def send_slowly(self) -> None:
        self.reply(0, b"", len(CONTENT))
        while not self.server.closing.wait(0.02):
            self.wfile.write(CONTENT[:10])

    def send_silent(self) -> None:
        self.server.closing.wait(10)

    def send_elsewhere(self) -> None:
        self.send_response(302)
        self.send_header("Location", self.server.mirror("good/data.bin"))
        self.end_headers()

    def send_ftp(self) -> None:
        self.send_response(302)
        self.send_header("Location", "ftp://127.0.0.1/data.bin")
        self.end_headers()

    def send_missing(self) -> None:
        self.send_error(404)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as running:
        yield running


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def part_of(folder: Path, content: bytes) -> Path:
    part = folder / f"{FILE.name}.part"
    part.write_bytes(content)
    return part


def closed_mirror() -> str:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["good", "good/", "unmeasured", "rangeless", "elsewhere"])
def test_fetch_downloads_the_file(server: Server, tmp_path: Path, kind: str) -> None:
    path = fetch(FILE, [server.mirror(kind)], tmp_path / "made" / "here")

    assert path == tmp_path / "made" / "here" / "data.bin"
    assert path.read_bytes() == CONTENT
    assert not path.with_name("data.bin.part").exists()


def test_download_is_reported_once(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D-03's line."""
    fetch(FILE, [server.mirror("good")], tmp_path)
    fetch(FILE, [server.mirror("good")], tmp_path)
    printed = capsys.readouterr()
    line = f"The data.bin file is downloaded and saved in the path {tmp_path} after processing\n"
    # The oldest rich ends the line of a bar that it doesn't draw.
    assert (printed.out, printed.err.strip()) == (line, "")


def test_fetch_keeps_an_existing_file(server: Server, tmp_path: Path) -> None:
    (tmp_path / FILE.name).write_bytes(b"mine")

    assert fetch(FILE, [server.mirror("good")], tmp_path).read_bytes() == b"mine"
    assert server.seen == []


def test_fetch_resumes_a_partial_file(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT[:1_000])

    assert fetch(FILE, [server.mirror("good")], tmp_path).read_bytes() == CONTENT
    assert server.seen == [("good", "bytes=1000-")]


def test_fetch_restarts_if_the_server_ignores_ranges(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT[:1_000])

    assert fetch(FILE, [server.mirror("rangeless")], tmp_path).read_bytes() == CONTENT
    assert server.seen == [("rangeless", "bytes=1000-")]


def test_next_mirror_resumes_an_interrupted_download(server: Server, tmp_path: Path) -> None:
    mirrors = [server.mirror("truncated"), server.mirror("good")]

    assert fetch(FILE, mirrors, tmp_path).read_bytes() == CONTENT
    assert server.seen == [("truncated", None), ("good", f"bytes={SENT_BYTES}-")]


@pytest.mark.medium
def test_truncating_mirror_is_retried_while_it_progresses(server: Server, tmp_path: Path) -> None:
    assert fetch(FILE, [server.mirror("truncated")], tmp_path).read_bytes() == CONTENT
    assert [range_ for _, range_ in server.seen] == [None, "bytes=4096-", "bytes=8192-"]


def test_truncating_mirror_is_abandoned_without_progress(server: Server, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"truncated_rangeless/data.bin: closed after 4,096 of 10,240"
    ):
        fetch(FILE, [server.mirror("truncated_rangeless")], tmp_path)

    assert len(server.seen) == 2


def test_next_mirror_is_tried_after_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    mirrors = [server.mirror("wrong"), server.mirror("good")]

    assert fetch(FILE, mirrors, tmp_path).read_bytes() == CONTENT
    assert server.seen == [("wrong", None), ("good", None)]


def test_wrong_checksum_leaves_no_file(server: Server, tmp_path: Path) -> None:
    wrong = hashlib.md5(CONTENT[::-1]).hexdigest()

    with pytest.raises(DataError, match=f"wrong checksum: md5 {wrong} instead of {FILE.md5}"):
        fetch(FILE, [server.mirror("wrong")], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("left", [b"\xff" * 1_000, b"\xff" * 20_000])
def test_partial_file_with_wrong_bytes_is_dropped(
    server: Server, tmp_path: Path, left: bytes
) -> None:
    part_of(tmp_path, left)

    assert fetch(FILE, [server.mirror("good")], tmp_path).read_bytes() == CONTENT
    assert server.seen == [("good", f"bytes={len(left)}-"), ("good", None)]


def test_complete_partial_file_is_used(server: Server, tmp_path: Path) -> None:
    part_of(tmp_path, CONTENT)

    assert fetch(FILE, [server.mirror("good")], tmp_path).read_bytes() == CONTENT
    assert server.seen == [("good", f"bytes={len(CONTENT)}-")]


def test_bytes_at_a_wrong_offset_are_refused(server: Server, tmp_path: Path) -> None:
    part = part_of(tmp_path, CONTENT[:1_000])

    with pytest.raises(DataError, match="sent bytes from 5 instead of 1,000"):
        fetch(FILE, [server.mirror("shifted")], tmp_path)
    assert part.read_bytes() == CONTENT[:1_000]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stalling", "silent"])
def test_stalled_mirror_is_skipped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(mirror_transfer, "STALL_S", STALL_S)
    mirrors = [server.mirror(kind), server.mirror("good")]
    began = time.monotonic()

    assert fetch(FILE, mirrors, tmp_path).read_bytes() == CONTENT
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_error_has_the_reason_of_each_mirror(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_transfer, "STALL_S", STALL_S)
    mirrors = [server.mirror(kind) for kind in ("missing", "silent", "ftp")] + [closed_mirror()]

    with pytest.raises(DataError) as caught:
        fetch(FILE, mirrors, tmp_path)

    head, *reasons = str(caught.value).splitlines()
    assert head == "mnist: data.bin could not be downloaded:"
    assert reasons[0] == f"  {mirrors[0]}/data.bin: HTTP Error 404: Not Found"
    assert reasons[1] == f"  {mirrors[1]}/data.bin: sent nothing for 0.25 s"
    assert reasons[2] == f"  {mirrors[2]}/data.bin: unknown url type: ftp"
    assert reasons[3].endswith("Connection refused")


def test_slow_mirror_is_distinguished_from_a_silent_one(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_transfer, "ROUNDS", 1)
    monkeypatch.setattr(mirror_transfer, "STALL_S", 1.0)
    reason = r"slowly/data\.bin: sent fewer than 16,384 bytes in 1 s"
    with pytest.raises(DataError, match=reason):
        fetch(FILE, [server.mirror("slowly")], tmp_path)


def test_size_other_than_published_is_refused(server: Server, tmp_path: Path) -> None:
    file = RemoteFile(FILE.name, FILE.md5, size_bytes=5)

    with pytest.raises(DataError, match="offers 10,240 bytes instead of 5"):
        fetch(file, [server.mirror("good")], tmp_path)


@pytest.mark.parametrize("mirror", ["ftp://host/folder", "file:///etc", "/etc", "httpx://host"])
def test_mirrors_of_other_schemes_are_refused(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(DataError, match="unknown url type"):
        fetch(FILE, [mirror], tmp_path)


def test_fetch_without_mirrors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.bin could not be .* dataset.mirrors is empty"):
        fetch(FILE, [], tmp_path)


@pytest.mark.medium
def test_failed_download_has_a_hint(server: Server, tmp_path: Path) -> None:
    files = [FILE, RemoteFile("labels.bin", "0")]
    mirrors = [server.mirror("good"), closed_mirror()]

    with pytest.raises(DataError) as caught:
        fetch_all("mnist", files, mirrors, tmp_path)

    message = str(caught.value)
    assert message.startswith("mnist: labels.bin could not be downloaded:")
    assert f"{mirrors[0]}/labels.bin: wrong checksum" in message
    assert f"{mirrors[1]}/labels.bin: " in message
    assert f"Put data.bin, labels.bin into {tmp_path}" in message
    assert "dataset.root=DIR" in message
    assert "dataset.name=synthetic +dataset.like=mnist" in message


def test_fetch_all_downloads_every_file(server: Server, tmp_path: Path) -> None:
    files = [FILE, RemoteFile("copy.bin", FILE.md5, len(CONTENT))]

    fetch_all("mnist", files, [server.mirror("good")], tmp_path)

    assert [(tmp_path / file.name).read_bytes() == CONTENT for file in files] == [True, True]


def fetch_in_process(mirror: str, folder: Path) -> None:
    fetch(FILE, [mirror], folder)


@pytest.mark.slow
def test_parallel_processes_download_once(server: Server, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    arguments = (server.mirror("late"), tmp_path)
    processes = [spawn.Process(target=fetch_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)

    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / FILE.name).read_bytes() == CONTENT
    assert server.seen == [("late", None)]


def test_file_system_without_locks_is_supported(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    assert fetch(FILE, [server.mirror("good")], tmp_path).read_bytes() == CONTENT


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"

    message = rf"{folder}: can't be written .*cache.root=DIR"
    with pytest.raises(DataError, match=message), lock_data_folder(folder):
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_progress_is_shown_only_on_a_terminal(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stream: Callable[[], io.StringIO],
    shown: bool,
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())

    fetch(FILE, [server.mirror("good")], tmp_path)

    assert (FILE.name in sys.stderr.getvalue()) is shown


@pytest.mark.medium
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_unknown_certificates_are_refused(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request, *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Server()
    server.socket = context.wrap_socket(server.socket, server_side=True)

    with serving(server), pytest.raises(DataError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(FILE, [server.mirror("good", "https")], tmp_path)
    assert server.seen == []
