"""Python programs as real processes, without the seconds that each would spend on imports.

A program is forked from a server process that has imported the libraries (the standard library's
`forkserver`). It has its own session, process group, environment, directory and standard streams,
and may be killed like any other process. Most workers and command lines under test start this way;
a few tests start the interpreter itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from perdure.embedded.process import launch

_IMPORTED = [
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "kombu.transport.redis",
    "perdure.builtin",
    "perdure.channels.http.app",
    "perdure.models.offline.model",
    "perdure.models.providers.openai",
    "pytest.__main__",  # multiprocessing's main module when the suite runs without xdist
    "perdure.tasks.deliveries",
    "perdure.tasks.turns",
    "tests.forked",
    "perdure.cli",
    "perdure.workers.lifecycle",
]

_READ, _WRITTEN = os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(_IMPORTED)


@dataclass(frozen=True, slots=True)
class Program:
    """A program: the function `main` (`module:function`) with `argv`. The process itself opens its streams."""

    main: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    stdin: Path = Path(os.devnull)
    stdout: Path = Path(os.devnull)
    stderr: Path = Path(os.devnull)


def start(program: Program) -> BaseProcess:
    """Start the program. Its output is appended to `stdout` and `stderr`. `exitcode` is negative after a signal."""
    process = _forks.Process(target=_become, args=(program,), daemon=True)
    process.start()
    return process


def _become(program: Program) -> None:
    os.setsid()
    if sys.platform == "linux":
        launch._die_with(os.getppid())  # so that a killed test run leaves no processes
    for number, path in enumerate((program.stdin, program.stdout, program.stderr)):
        opened = os.open(path, _WRITTEN if number else _READ, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115 (the process's own streams, open until it ends)
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.directory)
    sys.argv = list(program.argv)
    try:
        pkgutil.resolve_name(program.main)()
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not run them
