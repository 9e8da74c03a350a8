"""A PgBouncer for the tests, in transaction mode unless a test asks for another one, on loopback.

The program comes from the system (Debian: `pgbouncer`). If it is not installed, the tests that need it are skipped; in
continuous integration (`CI=true`) they fail.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg2
from sqlalchemy.engine import URL, make_url

from tests.databases import ADMINISTRATOR
from tests.processes.faults import wait_until
from tests.processes.gateway import free_port
from tests.programs import program

_START_S = 20.0

_CONFIGURATION = """
[databases]
* = host={host} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 10
max_client_conn = 500
server_reset_query =
logfile = {directory}/pgbouncer.log
pidfile =
"""


class Pooler:
    """A pooler that a test may kill and start again. `url` is the URL of the database through it, and stays the same.

    `access`: the directory of PostgreSQL's `pg_ident.conf`, to which the pooler's account is added.
    """

    def __init__(self, database_url: str, access: Path, mode: str = "transaction") -> None:
        pgbouncer = program("pgbouncer", path="/usr/sbin")
        direct = make_url(database_url)
        _allow_account(direct, access)
        port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="perdure-"))
        file = self._directory / "pgbouncer.ini"
        host = str(direct.query["host"])
        file.write_text(
            _CONFIGURATION.format(host=host, user=direct.username, port=port, mode=mode, directory=self._directory)
        )
        as_account = []
        if os.geteuid() == 0:
            # PgBouncer runs under PostgreSQL's account, because no other account may enter the directory of the socket.
            account = pwd.getpwuid(Path(host).stat().st_uid)
            os.chown(self._directory, account.pw_uid, -1)
            file.chmod(0o644)
            access.parents[1].chmod(0o711)
            as_account = ["-u", account.pw_name]
        self._argv = [pgbouncer, *as_account, str(file)]
        self._url = URL.create("postgresql", "anyone", host="127.0.0.1", port=port, database=direct.database)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._url.render_as_string(hide_password=False)

    def start(self) -> None:
        """Start the pooler, and wait until it answers."""
        path = self._directory / "out"
        with path.open("ab") as out:
            self._process = subprocess.Popen(self._argv, stdout=out, stderr=out, start_new_session=True, cwd="/")
        wait_until(partial(_answers, self._url, self._process, path), "PgBouncer answers", _START_S)

    def kill(self) -> None:
        """End the pooler with SIGKILL, if it runs."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)

    def close(self) -> None:
        """End the pooler and delete its directory."""
        self.kill()
        shutil.rmtree(self._directory)


@contextmanager
def running(database_url: str, access: Path, mode: str = "transaction") -> Iterator[str]:
    """Run a pooler within the block; yields the URL of the database through the pooler. `access`: see `Pooler`."""
    pooler = Pooler(database_url, access, mode)
    try:
        pooler.start()
        yield pooler.url
    finally:
        pooler.close()


def _allow_account(direct: URL, access: Path) -> None:
    ident, account = access / "pg_ident.conf", pwd.getpwuid(Path(str(direct.query["host"])).stat().st_uid).pw_name
    line = f'{direct.username} "{account}" {direct.username}\n'
    if line not in ident.read_text():
        ident.write_text(ident.read_text() + line)
    administrator = direct.set(drivername="postgresql", username=ADMINISTRATOR)
    with psycopg2.connect(administrator.render_as_string(hide_password=False)) as connection:
        connection.cursor().execute("SELECT pg_reload_conf()")
    connection.close()


def _answers(url: URL, process: subprocess.Popen[bytes], out: Path) -> bool:
    assert process.poll() is None, f"PgBouncer ended with status {process.returncode}: {out.read_text()}"
    try:
        psycopg2.connect(url.render_as_string(hide_password=False)).close()
    except psycopg2.OperationalError:
        return False
    return True
