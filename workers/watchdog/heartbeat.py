"""The worker's side of the watchdog: a thread that starts the watchdog process and writes heartbeats to it.

The thread waits for no server and for no lock except the interpreter's, so it continues while the database is
unavailable. `perdure.workers.lifecycle` starts the thread when the worker is ready. The thread keeps running during
the shutdown, until the process ends. If the watchdog ends before the worker, the thread starts another watchdog.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from perdure.errors import loggable
from perdure.workers.watchdog import process as watchdog

log = logging.getLogger(__name__)

LEAST_LIMIT_S = 30.0
"""The minimum time limit in seconds. It applies if two lease durations are shorter."""

_LEASES = 2
_REPORT = (sys.executable, "-m", "perdure.workers.watchdog.kill_report")
_STDERR = 2
_FIRST = 1


class Heartbeat:
    """Makes the watchdog kill this process after two lease durations (at least `LEAST_LIMIT_S`) without a heartbeat.

    Args:
        name: The worker's name, for the log and `/readyz`.
        lease_s: The duration of a lease, in seconds.
        environment: Variables to add to the environment of the program that reports a kill.
    """

    def __init__(self, name: str, lease_s: float, environment: Mapping[str, str]) -> None:
        self._name = name
        self._limit_s = max(_LEASES * lease_s, LEAST_LIMIT_S)
        self._environment = environment

    def start(self) -> None:
        """Start the thread. Call this once in a process."""
        _dump_stacks_on_signal()
        log.info("the watchdog kills this worker if none of its threads runs for %g s", self._limit_s)
        threading.Thread(target=self._run, name="perdure-heartbeat", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                with self._started() as process, process.stdin as pipe:  # type: ignore[union-attr]  # `_started` requests a pipe
                    self._beat(pipe)
            except OSError as error:
                log.warning("the watchdog has ended or cannot be started (%s); another one is started", loggable(error))
            time.sleep(self._limit_s / watchdog.LOOKS)

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            watchdog.command(os.getpid(), self._name, self._limit_s, _REPORT),
            env={**os.environ, **self._environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
        )

    def _beat(self, pipe: IO[bytes]) -> None:
        """Write heartbeats until the watchdog ends.

        Raises:
            BrokenPipeError: the watchdog has ended.
        """
        os.set_blocking(pipe.fileno(), False)
        while True:
            with suppress(BlockingIOError):  # the pipe is full because the watchdog is suspended
                os.write(pipe.fileno(), b".")
            time.sleep(self._limit_s / watchdog.LOOKS)


def _dump_stacks_on_signal() -> None:
    """Make `DUMP_SIGNAL` write the stacks of all threads to stderr.

    C code writes the stacks, since no Python code runs in a worker that must be killed. Process 1 of a container cannot
    be killed from within the container, so in process 1 the signal also ends the process.
    """
    first = os.getpid() == _FIRST
    if first:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(watchdog.DUMP_SIGNAL, ctypes.cast(libc._exit, ctypes.c_void_p))  # noqa: SLF001 (its name in C)
    faulthandler.register(watchdog.DUMP_SIGNAL, file=_STDERR, all_threads=True, chain=first)
