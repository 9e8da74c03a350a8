"""A slow answer, the worker that writes it killed, and the answer.

`Demonstration` runs `perdure up` in a throw-away directory, with servers of its own and `slow_model` as its model. It
sends one message, kills the worker that writes the answer (SIGKILL), and waits for the answer of the other worker. At
its end it has stopped all that it started, and removed the directory. The environment's settings do not apply, so
nothing of an installation on this machine is read or written.

It fails if the message is not answered, or if the order is not placed exactly once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty
from textwrap import fill

import httpx2
import psutil

from perdure.cli.demo import shop
from perdure.cli.demo.slow_model import ANSWER, Finished, Requested, Seen, SlowModel, Wrote
from perdure.cli.display import write_text
from perdure.cli.errors import Failure
from perdure.cli.serve.interrupting import ignore_signals
from perdure.cli.serve.options import LOOPBACK
from perdure.servers.process import launch

_TEXT = "Two bottles of ink, please."
_CONVERSATION = "demo"
_WORD_S = 0.35
_KILLED_AFTER_WORDS = 10
_LEASE = {"LEASE_S": "6", "HEARTBEAT_S": "2", "SWEEP_S": "1"}
"""Shorter than the defaults (30, 10 and 5), so that the demonstration takes less than a minute."""
_WIDTH = 100
_START_S, _STEP_S, _STOP_S = 120.0, 60.0, 90.0
_PREFIXES = ("PERDURE_", "OPENAI_", "ANTHROPIC_", "FLOWER_")


class Demonstration:
    """One run. Prints each event with the seconds since the start."""

    def __init__(self, port: int) -> None:
        self._began = time.monotonic()
        self._url = f"http://{LOOPBACK}:{port}"
        self._port = port
        self._model = SlowModel(_WORD_S, self._asker)
        self._workers: dict[int, psutil.Process] = {}
        self._up: _Up | None = None

    def run(self) -> None:
        """Show the whole sequence.

        Raises:
            Failure: the processes did not start, or the message was not answered as promised.
        """
        self._say("PostgreSQL, Redis, a gateway and two workers start in a throw-away directory.")
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perdure-demo-")))
            orders = directory / "orders"
            stack.enter_context(self._model.serving())
            self._up = up = stack.enter_context(
                _Up.running(self._port, directory, self._environment(directory, orders))
            )
            self._say(f"They are ready. The page: {self._url}/#{_CONVERSATION}")
            _pause("Open the page, then press Enter to send a message.")
            turn_id = self._send()
            self._say(f"You: {_TEXT}  The gateway has accepted it: its row is committed.")
            killed, killed_at = self._until_killed(up)
            self._until_answered(up, killed, killed_at)
            self._report(turn_id, orders)
            _pause("The page shows the answer. Press Enter to stop all processes.")
            ignore_signals()
            self._say("All processes are asked to stop.")
        self._say("Nothing is left: the processes have ended, and the directory is removed.")

    def _environment(self, directory: Path, orders: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
        return {
            **kept,
            "NO_PROXY": LOOPBACK,
            "no_proxy": LOOPBACK,
            "PERDURE_DATA_DIR": str(directory / "data"),
            "PERDURE_AGENTS": shop.__name__,
            "PERDURE_MODEL": "demo:slow",
            "PERDURE_ENDPOINTS__DEMO__URL": self._model.url,
            shop.ORDERS: str(orders),
            **{f"PERDURE_TURN__{name}": value for name, value in _LEASE.items()},
        }

    def _send(self) -> str:
        message = {"user_id": "local", "text": _TEXT, "conversation": _CONVERSATION}
        accepted = httpx2.post(f"{self._url}/v1/messages", json=message, timeout=_STEP_S, trust_env=False)
        return str(accepted.raise_for_status().json()["turn_id"])

    def _asker(self, port: int) -> int:
        """The id of the worker that has the connection from `port`; called in a thread of the model server."""
        if self._up is None:
            raise Failure("The model was asked before a message was sent.")
        worker = self._up.process_of(port)
        self._workers[worker.pid] = worker
        return worker.pid

    def _until_killed(self, up: _Up) -> tuple[int, float]:
        """Follow the turn up to the middle of its answer, and kill the worker. Returns its id, and when it was."""
        words: list[str] = []
        while True:
            match self._next(up):
                case Requested(pid, step):
                    self._say(f"{_name(self._workers[pid])} asks the model for step {step}: {_STEPS[step]}")
                case Wrote(pid, text):
                    words.append(text)
                    if len(words) == _KILLED_AFTER_WORDS:
                        break
                case Finished():
                    raise Failure("The answer was complete before the worker could be killed.")
        name = _name(self._workers[pid])
        self._workers[pid].kill()
        killed_at = time.monotonic()
        self._say(f'kill -9: {name} is dead. Of the answer there is only "{" ".join(words)} …"')
        self._say(f"The lease of the dead worker expires within {_LEASE['LEASE_S']} s (30 s by default).")
        return pid, killed_at

    def _until_answered(self, up: _Up, killed: int, killed_at: float) -> None:
        """Follow the turn in the other worker up to the end of its answer."""
        while True:
            match self._next(up):
                case Requested(_, 1):
                    raise Failure("The turn has begun anew, so the order is placed twice.")
                case Requested(pid, _):
                    self._say(
                        f"{_name(self._workers[pid])} goes on from the last commit, "
                        f"{time.monotonic() - killed_at:.1f} s after the kill. It does not order again: it asks the "
                        "model for step 2 again."
                    )
                case Finished(pid) if pid != killed:
                    return
                case Wrote() | Finished():
                    pass

    def _report(self, turn_id: str, orders: Path) -> None:
        url = f"{self._url}/v1/turns/{turn_id}"
        turn = httpx2.get(url, params={"wait": 30}, timeout=_STEP_S, trust_env=False).raise_for_status().json()
        text = (turn["reply"] or {}).get("text", "").strip()
        if turn["status"] != "done" or text != ANSWER:
            raise Failure(f"The turn is {turn['status']}, and its reply is {text!r}.")
        self._say(f"Answered: {text}")
        placed = orders.read_text(encoding="utf-8").splitlines()
        if len(placed) != 1:
            raise Failure(f"The order was placed {len(placed)} times.")
        self._say("The order was placed once.")

    def _next(self, up: _Up) -> Seen:
        until = time.monotonic() + _STEP_S
        while time.monotonic() < until:
            up.require_running()
            try:
                return self._model.seen.get(timeout=0.5)
            except Empty:
                continue
        raise Failure(f"Nothing has happened for {_STEP_S:g} s.\n{up.last_lines()}")

    def _say(self, text: str) -> None:
        moment = f"{time.monotonic() - self._began:5.1f} s  "
        write_text(fill(text, _WIDTH, initial_indent=moment, subsequent_indent=" " * len(moment)))


_STEPS = {
    1: "it gets a call of the tool `order`, which is committed and run.",
    2: "the tool's result is committed. The model writes its answer slowly.",
}


class _Up:
    """A running `perdure up`."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self._popen = popen
        self._lines: deque[str] = deque(maxlen=30)
        self._is_up = threading.Event()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @classmethod
    @contextmanager
    def running(cls, port: int, directory: Path, environment: dict[str, str]) -> Iterator[_Up]:
        """Run `perdure up` for the block, in `directory`.

        Raises:
            Failure: it does not start.
        """
        command = [sys.executable, "-P", "-m", "perdure.cli", "up", "--no-flower", "--port", str(port)]
        popen = subprocess.Popen(
            launch.command(command, dies_with_parent=True),
            env={**environment, "PYTHONUNBUFFERED": "1"},
            cwd=directory,  # without a `.env`
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this command only, which stops it
        )
        made = cls(popen)
        try:
            made._wait_until_up()
            yield made
        finally:
            ignore_signals()
            made._stop()

    def process_of(self, port: int) -> psutil.Process:
        """The worker that has the TCP connection from `port`.

        Raises:
            Failure: there is none.
        """
        for each in psutil.Process(self._popen.pid).children(recursive=True):
            try:
                connections = each.net_connections("tcp")
            except psutil.Error:  # it ended
                continue
            if any(getattr(connection.laddr, "port", None) == port for connection in connections):
                return each
        raise Failure("The worker that asks the model cannot be found.")

    def require_running(self) -> None:
        """Raises `Failure` if `perdure up` has ended."""
        if self._popen.poll() is not None:
            self._reading.join(5)
            raise Failure(f"`perdure up` ended with status {self._popen.returncode}:\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The last lines of its output."""
        return "\n".join(self._lines)

    def _read(self) -> None:
        for line in self._popen.stdout or ():
            self._lines.append(line.rstrip("\n"))
            if "perdure is up" in line:
                self._is_up.set()

    def _wait_until_up(self) -> None:
        until = time.monotonic() + _START_S
        while not self._is_up.wait(0.2):
            self.require_running()
            if time.monotonic() > until:
                raise Failure(f"`perdure up` is not ready after {_START_S:g} s:\n{self.last_lines()}")

    def _stop(self) -> None:
        if self._popen.poll() is None:
            self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            raise Failure(f"`perdure up` did not end within {_STOP_S:g} s, and was killed.") from None
        finally:
            self._reading.join(5)


def _name(worker: psutil.Process) -> str:
    """`worker1 (process 4242)`."""
    argv = worker.cmdline()
    name = argv[argv.index("--name") + 1] if "--name" in argv else "A worker"
    return f"{name} (process {worker.pid})"


def _pause(text: str) -> None:
    """On a terminal, wait for Enter."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        input(f"         {text} ")
