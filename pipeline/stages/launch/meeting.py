"""The meeting of a run's processes before JAX connects them.

JAX ends a process without an exception if others are missing, and doesn't name them. Here the first
process waits until all others have reported to it. Then all connect.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from pipeline.core.errors import RunError, get_system_reason, printable
from pipeline.core.files.value_text import join_first
from pipeline.core.host.launchers import RankPlace

MAX_LINE_BYTES = 4_096
"""Longest line in bytes, with its end, that is read; processes send shorter lines."""
LINE_S = 2.0
"""Seconds in which a process that connects must send its line."""
RETRY_S = 0.25
"""Seconds between two attempts to reach the first process."""
MAX_NAMES = 20
"""Most missing ranks that a message names."""


def meet(place: RankPlace, limit_s: float) -> None:
    """Wait until all processes have reported to the first.

    Raises RunError, in all processes that can be reached, if some are missing after `limit_s`, if
    two have the same rank, if a rank is out of range, or if they have different numbers of
    processes. Also raises it if the first process can't listen at its address.
    """
    problem = _gather(place, limit_s) if place.rank == 0 else _report(place, limit_s)
    if problem:
        raise RunError(problem)


def _gather(place: RankPlace, limit_s: float) -> str:
    """Wait for the reports of all processes; send them the problem, "" for none, and return it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(_listen(place))
        except OSError as error:
            # The error's text repeats the address, unlike the system's text for its number.
            reason = os.strerror(error.errno) if error.errno else get_system_reason(error)
            return f"{place}: can't listen at {place.address}: {reason}"
        connections = _Connections(place, stack)
        problem = connections.wait(server, limit_s)
        connections.answer(problem)
    return problem


def _listen(place: RankPlace) -> socket.socket:
    """Return a server at the address of the place, or at all addresses of the machine.

    It listens at all if processes are on several machines: the name of the first process may
    resolve to an address that only others can reach.
    """
    if place.is_on_one_machine:
        host = "127.0.0.1" if place.host == "localhost" else place.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, place.port), family=family)
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", place.port), family=socket.AF_INET6, dualstack_ipv6=True
            )
    return socket.create_server(("", place.port))


@dataclass
class _Connections:
    """Open connections of the processes that have reported and wait for an answer."""

    place: RankPlace
    stack: ExitStack
    by_rank: dict[int, socket.socket] = field(default_factory=dict)
    refused: list[socket.socket] = field(default_factory=list)
    """Connections of processes whose rank or size is wrong. They get the answer too."""

    def wait(self, server: socket.socket, limit_s: float) -> str:
        """Wait until all processes have reported, and return "", or the first problem."""
        deadline = time.monotonic() + limit_s
        while True:
            self._remove_closed()
            missing = sorted(set(range(1, self.place.size)) - set(self.by_rank))
            left_s = deadline - time.monotonic()
            if not missing:
                return ""
            if left_s <= 0:
                ranks = join_first(list(map(str, missing)), MAX_NAMES)
                return (
                    f"after {limit_s:g} s, of the {self.place.size} processes these have not "
                    f"reported to process 0 at {self.place.address}: {ranks}"
                )
            server.settimeout(left_s)
            with suppress(TimeoutError):
                connection, _ = server.accept()
                problem = self._receive(connection)
                if problem:
                    return problem

    def answer(self, problem: str) -> None:
        """Send the problem to all processes. They connect if it is empty, and end otherwise."""
        line = json.dumps({"problem": problem}).encode() + b"\n"
        for connection in (*self.by_rank.values(), *self.refused):
            with suppress(OSError):
                connection.sendall(line)

    def _receive(self, connection: socket.socket) -> str:
        """Add the process of a connection; return a problem if its rank or size is wrong, else "".

        A connection without a report is closed: it belongs to another program.
        """
        self.stack.callback(connection.close)
        report = read_line(connection, LINE_S)
        rank = report.get("rank")
        size = report.get("size")
        if type(rank) is not int or type(size) is not int:
            connection.close()
            return ""
        connection.settimeout(None)
        self._remove_closed()
        problem = self._find_problem(rank, size)
        if problem:
            self.refused.append(connection)
        else:
            self.by_rank[rank] = connection
        return problem

    def _find_problem(self, rank: int, size: int) -> str:
        if size != self.place.size:
            return f"process {rank} of {size} can't meet {self.place}: the sizes differ"
        if not 0 <= rank < size:
            return f"a process of {size} has rank {rank}: it must be from 0 to {size - 1}"
        if rank == 0 or rank in self.by_rank:
            return f"two processes of {size} have rank {rank}: their ranks must differ"
        return ""

    def _remove_closed(self) -> None:
        """Remove processes that have died; a launcher may start them again."""
        for rank, connection in list(self.by_rank.items()):
            if _has_closed(connection):
                del self.by_rank[rank]


def _report(place: RankPlace, limit_s: float) -> str:
    """Report to the first process, and return its answer. Retries, as its name may not resolve."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            left_s = max(deadline - time.monotonic(), RETRY_S)
            address = (place.host, place.port)
            with socket.create_connection(address, timeout=left_s) as connection:
                line = json.dumps({"rank": place.rank, "size": place.size})
                connection.sendall(f"{line}\n".encode())
                answer = read_line(connection, max(deadline - time.monotonic(), 0) + LINE_S)
            problem = answer.get("problem")
            if isinstance(problem, str):
                return printable(problem)
            reason = "it was reached"
        except OSError as error:
            reason = get_system_reason(error)
        if time.monotonic() + RETRY_S > deadline:
            return (
                f"{place}: no answer from process 0 at {place.address} in {limit_s:g} s ({reason})"
            )
        time.sleep(RETRY_S)


def read_line(connection: socket.socket, limit_s: float) -> Mapping[str, object]:
    """Return the JSON object of a line; empty if none arrives in time."""
    deadline = time.monotonic() + limit_s
    text = b""
    # Another program may send a byte at a time, or deeply nested lists.
    with suppress(OSError, ValueError, RecursionError):
        while not text.endswith(b"\n") and len(text) < MAX_LINE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = connection.recv(MAX_LINE_BYTES - len(text))
            if not part or time.monotonic() > deadline:
                return {}
            text += part
        line = json.loads(text)
        return line if isinstance(line, dict) else {}
    return {}


def _has_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
