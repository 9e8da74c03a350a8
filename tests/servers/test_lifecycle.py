"""Starting, sharing and stopping the embedded PostgreSQL and Redis, with real processes and signals."""

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from perdure.servers import EmbeddedServerError, lifecycle, postgres, redis
from perdure.servers.process import account
from perdure.servers.throwaway import servers
from tests.servers.conftest import Program

Start = Callable[..., Program]

PATIENCE_S = 30.0

HOLD = """
import json, sys
from pathlib import Path
from perdure.servers import postgres, redis
running = {"postgres": postgres, "redis": redis}[sys.argv[1]].start(Path(sys.argv[2]))
print(json.dumps({"pid": running.pid, "owned": running.owned, "url": running.url}), flush=True)
sys.stdin.readline()
print(json.dumps({"stopped": running.stop()}), flush=True)
"""


@pytest.fixture(params=["postgres", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    """The name of the server under test. Each test runs once for PostgreSQL and once for Redis."""
    return str(request.param)


@pytest.fixture
def module(kind: str) -> ModuleType:
    """The module that starts and finds the server under test."""
    return {"postgres": postgres, "redis": redis}[kind]


@pytest.fixture
def directory(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory for the server under test. No server runs in it yet."""
    return Path(request.getfixturevalue("cluster")) if kind == "postgres" else tmp_path / "redis"


def test_finding_no_server_creates_nothing(module: ModuleType, tmp_path: Path) -> None:
    """`find` does not create a missing directory, because the caller may have mistyped its name."""
    assert module.find(tmp_path / "none") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_started_server_is_found_until_it_is_stopped(module: ModuleType, directory: Path) -> None:
    """`find` returns a running server's URL and pid until the server is stopped."""
    running = module.start(directory)
    assert module.find(directory) == lifecycle.Endpoint(running.url, running.pid)
    assert running.owned
    process = psutil.Process(running.pid)
    assert running.stop()
    assert module.find(directory) is None
    process.wait(PATIENCE_S)  # `stop` returns when the server's locks are free; its process ends shortly after
    assert not process.is_running()


@pytest.mark.long
def test_a_shared_server_is_stopped_by_its_last_user(module: ModuleType, directory: Path) -> None:
    """A second `start` only joins the running server. The server runs until its last user calls `stop`."""
    first, second = module.start(directory), module.start(directory)
    assert (second.owned, second.pid, second.url) == (False, first.pid, first.url)
    assert not first.stop()
    assert module.find(directory) is not None
    assert second.stop()
    assert module.find(directory) is None


@pytest.mark.long
def test_two_processes_that_start_at_once_share_one_server(kind: str, directory: Path, program: Start) -> None:
    """If two processes start a server at once, they share one server. Two servers would destroy the directory."""
    both = [program(HOLD, kind, directory) for _ in range(2)]
    printed = [json.loads(each.until("pid")) for each in both]
    assert printed[0]["pid"] == printed[1]["pid"]
    assert sorted(each["owned"] for each in printed) == [False, True]
    for each in both:
        each.send_line()
    assert sorted(json.loads(each.until("stopped"))["stopped"] for each in both) == [False, True]


@pytest.mark.long
def test_a_server_outlives_a_killed_starter_and_belongs_to_the_next(
    kind: str, module: ModuleType, directory: Path, program: Start
) -> None:
    """If the process that started a server is killed, the next process joins the server and can stop it."""
    starter = program(HOLD, kind, directory)
    pid = json.loads(starter.until("pid"))["pid"]
    starter.process.kill()
    starter.ends()
    running = module.start(directory)
    assert (running.pid, running.owned) == (pid, False)
    assert running.stop()
    assert module.find(directory) is None
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long
def test_the_terminals_ctrl_c_does_not_reach_a_server(module: ModuleType, directory: Path) -> None:
    """A server runs in its own session, so that Ctrl-C does not stop it while the application finishes its work."""
    with module.start(directory) as running:
        assert os.getsid(running.pid) == running.pid != os.getsid(0)


@pytest.mark.long
def test_a_killed_server_ends_the_wait_and_the_next_start_makes_another(module: ModuleType, directory: Path) -> None:
    """If a server is killed, `wait` returns. The files that the server left behind do not prevent the next start."""
    first = module.start(directory)
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    os.kill(first.pid, signal.SIGKILL)
    waiting.join(20)
    assert not waiting.is_alive()
    assert module.find(directory) is None
    second = module.start(directory)
    assert second.owned
    assert second.pid != first.pid
    assert not first.stop()
    assert second.stop()


@pytest.mark.exhaustive
def test_a_keeper_ends_with_its_server_and_stops_it_on_sigterm(
    kind: str, module: ModuleType, directory: Path, program: Start
) -> None:
    """`python -m perdure.servers` ends when its server ends, and stops its server on SIGTERM."""
    keep = "import runpy, sys; runpy.run_module('perdure.servers', run_name='__main__', alter_sys=True)"
    keeper = program(keep, kind, directory)
    keeper.until("answers")
    found = module.find(directory)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    assert keeper.ends() == 1
    keeper = program(keep, kind, directory)
    keeper.until("answers")
    keeper.process.terminate()
    assert keeper.ends() == 0
    assert module.find(directory) is None


@pytest.mark.exhaustive
def test_an_ordinary_user_can_run_a_server(
    kind: str, nobody: account.Account, public_path: Path, program: Start
) -> None:
    """An ordinary user, not only root, can run a server."""
    os.chown(public_path, nobody.uid, nobody.gid)
    holder = program(HOLD, kind, public_path / kind, user=nobody)
    pid = json.loads(holder.until("pid"))["pid"]
    assert psutil.Process(pid).uids().real == nobody.uid
    holder.send_line()
    assert json.loads(holder.until("stopped"))["stopped"]


@pytest.mark.long
def test_a_directory_of_another_account_is_refused(
    kind: str, nobody: account.Account, public_path: Path, program: Start
) -> None:
    """Another account's directory is refused. The error names the account, the directory and `PERDURE_DATA_DIR`."""
    holder = program(HOLD, kind, public_path / kind, user=nobody)
    printed = holder.until("EmbeddedServerError:")
    assert holder.ends() == 1
    assert "nobody" in printed
    assert str(public_path / kind) in printed
    assert "PERDURE_DATA_DIR" in printed


@pytest.mark.long
def test_a_full_disk_is_reported_with_the_free_space(module: ModuleType, kind: str, small_disk: Path) -> None:
    """If the disk is full, the error names the directory, the free space and `PERDURE_DATA_DIR`."""
    if kind == "redis":
        with (small_disk / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, shutil.disk_usage(small_disk).free)
    with pytest.raises(EmbeddedServerError, match=r"the disk is full \(\d+\.\d MiB are free\)") as refused:
        module.start(small_disk / kind)
    assert str(small_disk / kind) in str(refused.value)
    assert "PERDURE_DATA_DIR" in str(refused.value)
    assert not (small_disk / kind / "initialising").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "x" * 90,
        "with a space",
        "ünïcode",
        "per%20cent",
    ],
)
def test_a_path_unfit_for_a_socket_or_url_gets_a_socket_elsewhere(
    module: ModuleType, kind: str, directory: Path, name: str
) -> None:
    """If the path is too long for a socket or needs quoting in a URL, the socket is in a separate directory."""
    odd = directory.parent / name / kind
    odd.parent.mkdir()
    if directory.exists():
        directory.rename(odd)
    with module.start(odd) as running:
        assert module.find(odd) is not None
        socket_directory = Path((odd / "socket-directory").read_text().strip())
        assert socket_directory.stat().st_mode & 0o777 == 0o700
        assert str(socket_directory) in running.url
        assert len(running.url) < 100
    with module.start(odd) as again:
        assert again.url == running.url
    shutil.rmtree(socket_directory)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["plain", "with a space"])
def test_a_copy_of_a_running_directory_is_an_installation_of_its_own(
    module: ModuleType, kind: str, directory: Path, name: str
) -> None:
    """A server in a copied directory ignores the copied files that name the original server's pid and socket path."""
    original, copied = directory.parent / name / kind, directory.parent / name / "copied"
    original.parent.mkdir()
    if directory.exists():
        directory.rename(original)
    with module.start(original) as running:
        subprocess.run(["cp", "-a", original, copied], check=True, stderr=subprocess.DEVNULL)
        assert module.find(copied) is None
        with module.start(copied) as other:
            assert other.owned
            assert other.pid != running.pid
            assert other.url != running.url
        assert module.find(original) == lifecycle.Endpoint(running.url, running.pid)
    for home in (original, copied):
        shutil.rmtree((home / "socket-directory").read_text().strip())


@pytest.mark.long
def test_throwaway_servers_leave_nothing(tmp_path: Path, public_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Throwaway servers remove their directory. They also remove the separate directories of their sockets."""
    elsewhere, parent = public_path, tmp_path / ("long" * 30)
    parent.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    with servers(parent) as both:
        assert postgres.find(both.directory / "postgres") is not None
        assert redis.find(both.directory / "redis") is not None
        assert len(list(elsewhere.glob("*/made-for"))) == 2
    assert list(parent.iterdir()) == []
    assert list(elsewhere.iterdir()) == []
