"""Processes wait for each other, and all print the reason if they can't meet."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from pipeline.core.errors import RunError
from pipeline.core.host.launchers import RankPlace
from pipeline.stages.launch import meeting
from pipeline.stages.launch.meeting import meet, read_line


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def gather(places: Iterable[RankPlace], limit_s: float = 20.0) -> list[str]:
    """Return the problem of each process; empty if it has met the others."""

    def attend(place: RankPlace) -> str:
        try:
            meet(place, limit_s)
        except RunError as problem:
            return str(problem)
        return ""

    places = list(places)
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(attend, places))


def test_processes_meet_in_any_order(address: str) -> None:
    places = [RankPlace(rank, 6, address, "torchrun") for rank in (3, 1, 5, 0, 2, 4)]
    assert gather(places) == [""] * 6
    assert gather(places) == [""] * 6  # at the same port


def test_missing_processes_are_listed(address: str) -> None:
    problems = gather([RankPlace(rank, 5, address, "torchrun") for rank in (0, 2)], limit_s=1.0)
    missing = (
        f"after 1 s, of the 5 processes these have not reported to process 0 at {address}: 1, 3, 4"
    )
    assert problems == [missing, missing]


def test_long_list_of_missing_processes_is_truncated(address: str) -> None:
    (problem,) = gather([RankPlace(0, 16_384, address, "torchrun")], limit_s=0.2)
    assert problem.endswith(
        ": 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20 and 16,363 more"
    )


def test_missing_first_process_is_reported(address: str) -> None:
    (problem,) = gather([RankPlace(1, 2, address, "torchrun")], limit_s=0.5)
    assert problem == (
        f"process 1 of 2: no answer from process 0 at {address} in 0.5 s (Connection refused)"
    )


def test_silent_first_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LINE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (problem,) = gather([RankPlace(1, 2, address, "torchrun")], limit_s=0.3)
    assert problem == (
        f"process 1 of 2: no answer from process 0 at {address} in 0.3 s (it was reached)"
    )


def test_unresolvable_host_is_reported() -> None:
    (problem,) = gather([RankPlace(1, 2, "no-such-host.invalid:80", "torchrun")], limit_s=0.5)
    assert "process 1 of 2: no answer from process 0 at no-such-host.invalid:80" in problem


@pytest.mark.parametrize(
    ("third", "problem"),
    [
        (
            RankPlace(1, 3, "127.0.0.1:1", "torchrun"),
            "two processes of 3 have rank 1: their ranks must differ",
        ),
        (
            RankPlace(2, 4, "127.0.0.1:1", "torchrun"),
            "process 2 of 4 can't meet process 0 of 3: the sizes differ",
        ),
        (
            RankPlace(7, 3, "127.0.0.1:1", "torchrun"),
            "a process of 3 has rank 7: it must be from 0 to 2",
        ),
    ],
)
def test_conflicting_ranks_or_sizes_are_refused(
    address: str, third: RankPlace, problem: str
) -> None:
    places = [
        RankPlace(0, 3, address, "torchrun"),
        RankPlace(1, 3, address, "torchrun"),
        RankPlace(third.rank, third.size, address, "torchrun"),
    ]
    problems = gather(places, limit_s=3.0)
    # A process that comes later finds nobody.
    assert problems[0] == problem
    assert problem in problems[1:]
    assert all(problems)


def test_port_in_use_is_reported(address: str) -> None:
    host, port = address.split(":")
    with socket.create_server((host, int(port))):
        (problem,) = gather([RankPlace(0, 2, address, "torchrun")])
    assert problem == f"process 0 of 2: can't listen at {address}: Address already in use"


def test_foreign_and_dead_connections_are_ignored(address: str) -> None:
    host, port = address.split(":")

    def disturb() -> None:
        lines = (
            b"",
            b"GET / HTTP/1.1\r\n",
            b"[]\n",
            b'{"rank": true, "size": 3}\n',
            b"\xff" * 9_000,
            b"[" * 4_090 + b"\n",
        )
        for line in (*lines, b'{"rank": 2, "size": 3}\n'):
            for _ in range(100):
                try:
                    with socket.create_connection((host, int(port))) as stranger:
                        stranger.sendall(line)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gather, [RankPlace(0, 3, address, "torchrun")])
        pool.submit(disturb).result()
        assert gather(
            [RankPlace(1, 3, address, "torchrun"), RankPlace(2, 3, address, "torchrun")]
        ) == ["", ""]
        assert first.result() == [""]


def test_slow_foreign_connection_does_not_block() -> None:
    ours, theirs = socket.socketpair()
    is_read = Event()

    def drip() -> None:
        while not is_read.wait(0.05):
            theirs.send(b" ")

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        pool.submit(drip)
        begun = time.monotonic()
        line = read_line(ours, 0.3)
        is_read.set()
    assert (line, time.monotonic() - begun < 5) == ({}, True)


def test_first_process_listens_at_its_host_name(address: str) -> None:
    name = socket.gethostname()
    port = address.split(":")[1]
    assert gather([RankPlace(rank, 2, f"{name}:{port}", "torchrun") for rank in (0, 1)]) == ["", ""]
