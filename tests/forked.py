"""Starts Python programs as real processes, without the seconds that each would spend on imports.

Each program is forked from the standard library's `forkserver`, a process that has already imported the libraries. The
program has its own session, process group, environment, directory and standard streams, and can be killed like any
other process. Most tests start their workers and commands in this way; a few start the Python interpreter itself.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from perdure.servers.process import launch

_IMPORTED = [
    "tests.entry_points",  # before the modules that import the function that it replaces
    "alembic.command",
    "billiard.pool",
    "celery.app.control",
    "celery.apps.beat",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "celery.worker.components",
    "celery.worker.consumer",
    "httpx2",
    "kombu.matcher",
    "kombu.transport.redis",
    "numpy",
    "perdure.adapters.pydantic_ai.adapt",
    "perdure.builtin",
    "perdure.casebank.plan.compute",
    "perdure.casebank.runs.apply",
    "perdure.channels.http.app",
    "perdure.cli",
    "perdure.models.embedders.resolve",
    "perdure.models.offline",
    "perdure.models.providers.model",
    "perdure.schedules.beat",
    "perdure.snapshots.resolve",
    "perdure.tasks.casebank",
    "perdure.tasks.deliveries",
    "perdure.tasks.maintenance",
    "perdure.tasks.memory",
    "perdure.tasks.sessions",
    "perdure.tasks.turns",
    "perdure.workers.consumer.consumer",
    "perdure.workers.control",
    "perdure.workers.lifecycle",
    "pydantic_ai",
    "pytest.__main__",  # the main module without xdist; multiprocessing imports it in each process
    "tests.files.killing",
    "tests.forked",
    "tests.processes.model_server",
    "tests.snapshots.killing",
]

_READ, _WRITTEN = os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(_IMPORTED)


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program to start.

    `main` is the entry point, as `module:function`. `argv` becomes `sys.argv`. `stdin`, `stdout` and `stderr` are the
    files that the new process opens as its standard streams.
    """

    main: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    stdin: Path = Path(os.devnull)
    stdout: Path = Path(os.devnull)
    stderr: Path = Path(os.devnull)


def start(program: Program) -> BaseProcess:
    """Start the program. The process appends to the files `stdout` and `stderr`.

    If signal N ends the process, the `exitcode` of the returned object is -N.
    """
    process = _forks.Process(target=_become, args=(program,), daemon=True)
    process.start()
    return process


def _become(program: Program) -> None:
    gc.freeze()  # a collection would copy the memory that this process shares with the server
    os.setsid()
    if sys.platform == "linux":
        launch._die_with(os.getppid())  # so that no process outlives a killed test run
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
        atexit._run_exitfuncs()  # multiprocessing does not run the exit functions
