"""Keeps a few processes running in the foreground, for `perdure up`.

Each process runs in its own session, so Ctrl-C in the terminal reaches only the supervisor. The supervisor then stops
the processes in the order of `stop_rank`. It sends SIGTERM to each process and, after a time limit, SIGKILL. At a
second Ctrl-C it sends SIGINT to the processes that still run, and at a third it kills them.

The supervisor restarts a process that dies, after a delay that doubles with each death. If a process exits with its
`final_status`, the supervisor stops all processes.

On Linux, no process outlives a killed supervisor: each process has a parent-death signal (see
`embedded.process.launch`). The kernel sends that signal when the *thread* that started the process ends, so call `run`
in the main thread.

The supervisor does not poll: it waits for the end of a child, a line of output, a signal or the end of a delay.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, TextIO, cast

from perdure.clock import Clock, SystemClock
from perdure.servers.process import launch
from perdure.servers.process.stop_signals import stop_signals

_COLOURS = ("36", "32", "35", "33", "34", "31")
_LONGEST_LINE_BYTES = 64 * 2**10

Probe = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """One process to keep running.

    Attributes:
        name: The prefix of its lines of output.
        argv: The program and its arguments.
        environment: Its complete environment. `None` means the supervisor's own environment.
        stop_rank: Lower ranks are stopped first. A rank is stopped once all processes of lower ranks have ended.
        stop_within_s: Seconds from SIGTERM to SIGKILL.
        ready: Awaited after each start; returns once the process is ready. `None`: the process is ready at once.
        final_status: The exit status that stops all processes, because a restart would not help. An example is the
            status for an invalid setting. `None`: the process has no such status.
    """

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] | None = None
    stop_rank: int = 0
    stop_within_s: float = 10
    ready: Probe | None = None
    final_status: int | None = None


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a process is restarted.

    Attributes:
        first_s: The delay after the first death, in seconds. It doubles with each consecutive death.
        cap_s: The maximum delay, in seconds.
        reset_after_s: The death of a process that ran at least this many seconds counts as a first death.
    """

    first_s: float = 1
    cap_s: float = 30
    reset_after_s: float = 60

    def deaths(self, before: int, lived_s: float) -> int:
        """The number of consecutive deaths, including the death of a process that ran `lived_s` seconds.

        `before` is the number without this death.
        """
        return 1 if lived_s >= self.reset_after_s else before + 1

    def delay_s(self, deaths: int) -> float:
        """Seconds to wait after the `deaths`th consecutive death (counted from 1): `first · 2^(deaths - 1)`, capped."""
        doublings = min(deaths - 1, 64)  # a larger power overflows a float
        return min(self.first_s * 2.0**doublings, self.cap_s)


def run(
    processes: Sequence[SupervisedProcess],
    *,
    on_ready: Callable[[], None] = lambda: None,
    backoff: Backoff | None = None,
    clock: Clock | None = None,
    output: TextIO | None = None,
) -> int:
    """Keep `processes` running until one of `stop_signals` arrives, then stop them in the order of `stop_rank`.

    At a second signal, sends SIGINT to the processes that still run; at a third, kills them.

    Args:
        processes: The processes, in the order of their start.
        on_ready: Called once, when every process has been ready at least once.
        backoff: The delays between restarts.
        clock: Measures how long a process has run.
        output: The stream for the prefixed lines; default: standard output.

    Returns:
        If a process exited with its `final_status`, that status. Otherwise 1 if a process had to be killed, else 0.
    """
    supervisor = _Supervisor(processes, on_ready, backoff or Backoff(), clock or SystemClock(), output or sys.stdout)
    return asyncio.run(supervisor.run())


async def listening(host: str, port: int, *, every_s: float = 0.1) -> None:
    """Return once a server accepts connections at `host` and `port`; for use in `SupervisedProcess.ready`.

    Tries to connect every `every_s` seconds.
    """
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(every_s)
        else:
            writer.close()
            return


class _Printer:
    """Writes whole lines, each after the name of its process. On a terminal the names are coloured."""

    def __init__(self, names: Sequence[str], output: TextIO, on_gone: Callable[[], None]) -> None:
        self._output = output
        self._on_gone = on_gone
        self._width = max(map(len, names), default=0)
        coloured = output.isatty() and "NO_COLOR" not in os.environ
        self._colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)} if coloured else {}

    def line(self, name: str, text: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if name in self._colours:
            prefix = f"\x1b[{self._colours[name]}m{prefix}\x1b[0m"
        try:
            self._output.write(f"{prefix} {text}\n")
            self._output.flush()
        except OSError:  # the terminal or the pipe is closed
            # Redirect the output to /dev/null. Otherwise later writes, and the flush at exit, would fail as well.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._output.fileno())
            self._on_gone()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The process that exited with its `final_status`, and its last line of output, which gives the reason."""

    name: str
    status: int
    message: str


class _Child:
    """One run of a process.

    Prints the lines that the process writes. When the process ends, kills its process group and sets `ended`.
    """

    def __init__(self, process: SupervisedProcess, printer: _Printer) -> None:
        self._name = process.name
        self._printer = printer
        self._unfinished = b""
        self.last_line = ""
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._popen = subprocess.Popen(
            launch.command(process.argv, dies_with_parent=True),
            env=None if process.environment is None else dict(process.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pipe = cast("IO[bytes]", self._popen.stdout)  # not None, because of `stdout=PIPE`
        os.set_blocking(self._pipe.fileno(), False)
        self._loop.add_reader(self._pipe.fileno(), self._read)

    @property
    def status(self) -> int:
        """The exit status of the ended process. A status of -N means that signal N ended the process."""
        return self._popen.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process, but not to its children: the process ends them itself."""
        self._send(signal.SIGTERM)

    def hasten(self) -> None:
        """Send SIGINT, so that the process ends faster. A second SIGTERM could be merged with the first."""
        self._send(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        # `Popen.send_signal` would reap a process that has just exited, and `reap_if_ended` would not find it.
        if not self.ended.is_set():
            os.kill(self._popen.pid, number)

    def kill(self) -> None:
        """Kill the process and its process group."""
        if not self.ended.is_set():
            os.killpg(self._popen.pid, signal.SIGKILL)

    def reap_if_ended(self) -> None:
        """If this child has ended, kill its process group, reap it and close its output. Called after SIGCHLD."""
        if self.ended.is_set() or not _has_exited(self._popen.pid):
            return
        # Kill the group before reaping the child. Reaping frees the id of the child and of its group for reuse.
        os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        while self._read():
            pass
        self._close()
        self.ended.set()

    def _read(self) -> bool:
        """Print some of the available lines; returns whether there may be more.

        Reading all lines at once would let a process that writes continuously block the other processes and Ctrl-C.
        """
        try:
            chunk = os.read(self._pipe.fileno(), _LONGEST_LINE_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._loop.remove_reader(self._pipe.fileno())
            return False
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        if len(self._unfinished) > _LONGEST_LINE_BYTES:
            lines.append(self._unfinished)
            self._unfinished = b""
        for line in lines:
            self._print(line)
        return True

    def _close(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        if self._unfinished:
            self._print(self._unfinished)

    def _print(self, line: bytes) -> None:
        self.last_line = line.decode(errors="replace").rstrip("\r")
        self._printer.line(self._name, self.last_line)


class _Supervisor:
    def __init__(
        self,
        processes: Sequence[SupervisedProcess],
        on_ready: Callable[[], None],
        backoff: Backoff,
        clock: Clock,
        output: TextIO,
    ) -> None:
        self._processes = processes
        self._on_ready = on_ready
        self._backoff = backoff
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._not_ready = {process.name for process in processes}
        self._stopping = asyncio.Event()
        self._hastened = asyncio.Event()
        self._kill_requested = asyncio.Event()
        self._killed = False
        self._refusal: _Refusal | None = None
        self._printer = _Printer([process.name for process in processes], output, self._stopping.set)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_stop_signal)
        loop.add_signal_handler(signal.SIGCHLD, self._on_child_exit)
        keeping = [asyncio.ensure_future(self._keep(process)) for process in self._processes]
        for task in keeping:
            # Before the supervisor stops, a task ends only because of a final status or a bug.
            task.add_done_callback(lambda _: self._stopping.set())
        try:
            await self._stop_in_order()
            await asyncio.gather(*keeping)
        finally:
            for child in self._children.values():
                child.kill()
        if self._refusal is not None:
            self._printer.line(self._refusal.name, self._refusal.message)
            return self._refusal.status
        return 1 if self._killed else 0

    async def _keep(self, process: SupervisedProcess) -> None:
        """Run the process repeatedly until the supervisor stops."""
        deaths = 0
        while not self._stopping.is_set():
            started = self._clock.monotonic()
            child = self._children[process.name] = _Child(process, self._printer)
            await self._until_ended(process, child)
            if self._stopping.is_set():
                return
            if child.status == process.final_status:
                self._refusal = _Refusal(process.name, child.status, child.last_line)
                self._printer.line(
                    process.name, f"{_exit_text(child.status)}, which a restart does not change; stopping"
                )
                return
            deaths = self._backoff.deaths(deaths, self._clock.monotonic() - started)
            delay_s = self._backoff.delay_s(deaths)
            self._printer.line(process.name, f"{_exit_text(child.status)}; restarting it in {delay_s:g} s")
            await _wait_for_any(delay_s, self._stopping)

    async def _until_ended(self, process: SupervisedProcess, child: _Child) -> None:
        ended = asyncio.ensure_future(child.ended.wait())
        probing = asyncio.ensure_future(self._probe(process))
        try:
            done, _ = await asyncio.wait((ended, probing), return_when=asyncio.FIRST_COMPLETED)
            if probing in done:
                probing.result()  # an exception of a probe is a bug, and ends the supervisor
            await ended
        finally:
            ended.cancel()
            probing.cancel()

    async def _probe(self, process: SupervisedProcess) -> None:
        if process.ready is not None:
            await process.ready()
        if process.name not in self._not_ready:
            return
        self._not_ready.discard(process.name)
        if not self._not_ready:
            self._on_ready()

    async def _stop_in_order(self) -> None:
        await self._stopping.wait()
        ranked = sorted(self._processes, key=lambda process: process.stop_rank)
        for _, rank in groupby(ranked, key=lambda process: process.stop_rank):
            await asyncio.gather(*(self._stop(process) for process in rank))

    async def _stop(self, process: SupervisedProcess) -> None:
        child = self._children.get(process.name)
        if child is None or child.ended.is_set():
            return
        child.terminate()
        deadline = self._clock.monotonic() + process.stop_within_s
        await _wait_for_any(process.stop_within_s, child.ended, self._hastened)
        if self._hastened.is_set():
            child.hasten()
            await _wait_for_any(max(deadline - self._clock.monotonic(), 0), child.ended, self._kill_requested)
        if not child.ended.is_set():
            self._killed = True
            self._printer.line(process.name, "killed: it did not end in time")
            child.kill()
        await child.ended.wait()

    def _on_stop_signal(self) -> None:
        events = (self._stopping, self._hastened, self._kill_requested)
        next((event for event in events if not event.is_set()), self._kill_requested).set()

    def _on_child_exit(self) -> None:
        for child in self._children.values():
            child.reap_if_ended()


async def _wait_for_any(seconds: float, *events: asyncio.Event) -> None:
    """Return when one of `events` is set, or after `seconds`."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()


def _has_exited(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_text(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"ended by signal {-status}"
