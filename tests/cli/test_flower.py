"""Flower requires credentials, whether `perdure` or `celery` starts it.

If the operator configures no credentials, Flower generates a password and listens on loopback only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import httpx2
import psutil
import pytest

from perdure.workers.flower.guard import serves, without_arguments
from tests import forked
from tests.cli.conftest import Environment

_PATIENCE_S = 30.0
_ENDS_WITHIN_S = 5.0
_ANY = "0.0.0.0"  # noqa: S104 (with credentials, or to be refused)

Start = Callable[..., BaseProcess]


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The path of the file that receives Flower's output."""
    return tmp_path / "output"


@pytest.fixture
def flower(nowhere: Environment, redis_url: str, tmp_path: Path, output: Path) -> Start:
    """A function that starts `perdure flower` or `celery -A perdure flower`."""
    addresses = {"PERDURE_DATABASE_URL": "postgresql://127.0.0.1:1/none", "PERDURE_REDIS_URL": redis_url}

    def start(command: str, **variables: str) -> BaseProcess:
        argv = command.split()
        main = {"perdure": "perdure.cli:main", "celery": "celery.__main__:main"}[argv[0]]
        environment = {**nowhere, **addresses, **variables}
        return forked.start(forked.Program(main, argv, environment, tmp_path, stdout=output, stderr=output))

    return start


@contextmanager
def running(process: BaseProcess, output: Path) -> Iterator[set[str]]:
    """The addresses on which the process listens. The process is killed after the block."""
    deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
    try:
        while not (found := _listens_on(process)):
            assert process.is_alive(), output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            pause.wait(0.1)
        yield found
    finally:
        process.kill()
        process.join()


def _listens_on(process: BaseProcess) -> set[str]:
    if process.pid is None or not psutil.pid_exists(process.pid):
        return set()
    connections = psutil.Process(process.pid).net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


def refused(process: BaseProcess, output: Path) -> str:
    """Wait until the process has ended with status 2; returns its output."""
    process.join(_PATIENCE_S)
    status = process.exitcode
    process.kill()
    process.join()
    assert status == 2, output.read_text()
    assert "Traceback" not in output.read_text()
    return output.read_text()


@pytest.mark.long
@pytest.mark.parametrize("command", ["celery -A perdure flower", "perdure flower"])
def test_without_authentication_flower_listens_on_loopback(flower: Start, output: Path, command: str) -> None:
    """If no credentials are configured, Flower listens on loopback only, because its pages can shut workers down."""
    with running(flower(f"{command} --port={free_port()}"), output) as addresses:
        assert addresses <= {"127.0.0.1", "::1"}


def status(port: int, host: str = "localhost", auth: tuple[str, str] | None = None, page: str = "tasks") -> int:
    """The HTTP status of Flower's response."""
    url = f"http://127.0.0.1:{port}/{page}"
    return httpx2.get(url, headers={"Host": host}, auth=auth, timeout=20).status_code


@pytest.mark.long
@pytest.mark.parametrize("command", ["celery -A perdure flower", "perdure flower"])
def test_flower_requires_a_password_that_is_generated_once(
    flower: Start, tmp_path: Path, output: Path, command: str
) -> None:
    """Flower requires a password, because any local account, and any web page in a local browser, can reach the port.

    A restarted Flower keeps the password.
    """
    passwords = set()
    for _ in range(2):
        port = free_port()
        with running(flower(f"{command} --port={port}"), output):
            assert status(port) == 401
            password = (tmp_path / "data" / "flower.password").read_text()
            assert status(port, auth=("perdure", password)) == 200
            assert status(port, "evil.example", auth=("perdure", password)) == 403
            passwords.add(password)
            assert status(port, "evil.example", page="metrics") == 403
    assert len(passwords) == 1
    assert ((tmp_path / "data" / "flower.password").stat().st_mode & 0o777) == 0o600


@pytest.mark.long
def test_the_operators_credentials_and_host_names_apply(flower: Start, tmp_path: Path, output: Path) -> None:
    """The operator's credentials replace the generated password, and the operator's host names are accepted."""
    port = free_port()
    variables = {"FLOWER_BASIC_AUTH": "ann:secret", "PERDURE_FLOWER__HOSTS": "flower.example, Other.example"}
    with running(flower(f"celery -A perdure flower --port={port}", **variables), output):
        assert status(port, auth=("ann", "secret")) == 200
        for host, expected in (("flower.example:80", 200), ("OTHER.example", 200), ("evil.example", 403)):
            assert status(port, host, auth=("ann", "secret")) == expected, host
    assert not (tmp_path / "data" / "flower.password").exists()


def test_the_password_can_be_disabled(flower: Start, output: Path) -> None:
    """`PERDURE_FLOWER__AUTH=none` disables the password on loopback.

    Flower's API, which can stop workers, stays closed.
    """
    port = free_port()
    with running(flower(f"perdure flower --port={port}", PERDURE_FLOWER__AUTH="none"), output) as addresses:
        assert addresses == {"127.0.0.1"}
        assert status(port) == 200
        assert status(port, page="api/tasks") == 401
        assert status(port, "evil.example") == 403


@pytest.mark.parametrize(
    ("address", "hosts", "host", "expected"),
    [
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "LOCALHOST:5555", True),
        ("127.0.0.1", (), "127.0.0.1:5555", True),
        ("::1", (), "[::1]:5555", True),
        ("localhost", (), "localhost.", True),
        ("127.0.0.1", (), "", False),
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost@evil.example", False),
        ("127.0.0.1", (), "[", False),
        ("127.0.0.1", ("flower.example",), "flower.example", True),
        ("", (), "flower.example", True),
        ("10.0.0.5", (), "flower.example", True),
        ("10.0.0.5", ("flower.example",), "10.0.0.5:5555", True),
        ("10.0.0.5", ("flower.example",), "127.0.0.1", True),
        ("10.0.0.5", ("flower.example",), "evil.example", False),
    ],
)
def test_which_hosts_are_accepted(address: str, hosts: tuple[str, ...], host: str, expected: bool) -> None:
    """Requests may name Flower's own address, a loopback name or a configured host name.

    If the address is not loopback and no names are configured, any name is accepted.
    """
    assert serves(host, address, hosts) is expected


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("()", "()"),
        ("{}", "{}"),
        ("(hidden)", "(hidden)"),
        ("{'session_id': '0198c0de-0000-7000-8000-000000000000'}", None),
        ("{'session_id': '0198c0de-0000-7000-8000-000000000000', (hidden)}", None),
        ("{'session_id': '0198c0de-0000-7000-8000-000000000000', 'text': 'secret'}", "(hidden)"),
        ("{'session_id': 'secret'}", "(hidden)"),
        ("('secret',)", "(hidden)"),
    ],
)
def test_events_of_other_publishers_are_kept_without_arguments(sent: str, kept: str | None) -> None:
    """In events about perdure's tasks, arguments other than ids are hidden, whichever process sent the event."""
    event = {"type": "task-sent", "name": "turns.submit", "args": sent, "kwargs": sent}
    assert without_arguments(event) == {**event, "args": kept or sent, "kwargs": kept or sent}
    other = {**event, "name": "shop.sell"}
    assert without_arguments(other) == other


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        ("celery -A perdure flower", {"FLOWER_BASIC_AUTH": "ann:"}),
        ("celery -A perdure flower --address=0.0.0.0", {}),
        ("celery -A perdure flower", {"FLOWER_ADDRESS": _ANY}),
        ("celery -A perdure flower --address=::", {"FLOWER_BASIC_AUTH": ""}),
        ("celery -A perdure flower --address=0.0.0.0", {"FLOWER_BASIC_AUTH": "ann:secret,ann:"}),
        ("perdure flower --address 0.0.0.0", {}),
        ("perdure flower", {"FLOWER_ADDRESS": _ANY}),
    ],
)
def test_beyond_loopback_without_authentication_it_is_refused(
    flower: Start, output: Path, command: str, variables: dict[str, str]
) -> None:
    """On a non-loopback address, Flower refuses to start without credentials.

    On any address, Flower refuses to start if a user has no password.
    """
    process = flower(command, **{"FLOWER_PORT": str(free_port()), **variables})

    assert "FLOWER_BASIC_AUTH" in refused(process, output)


def test_beyond_loopback_with_authentication_it_runs(flower: Start, output: Path) -> None:
    """With credentials, Flower listens on any address, as in compose.yaml."""
    port = free_port()
    command = f"celery -A perdure flower --address=0.0.0.0 --port={port}"
    with running(flower(command, FLOWER_BASIC_AUTH="ann:secret"), output) as addresses:
        assert addresses == {_ANY}


def test_authentication_in_its_own_configuration_counts(flower: Start, tmp_path: Path, output: Path) -> None:
    """Credentials in the working directory's `flowerconfig.py` suffice, because Flower reads that file."""
    (tmp_path / "flowerconfig.py").write_text(f"basic_auth = ['ann:secret']\naddress = '0.0.0.0'\nport = {free_port()}")
    with running(flower("celery -A perdure flower"), output) as addresses:
        assert addresses == {_ANY}


def test_dotenv_counts_for_flower(flower: Start, tmp_path: Path, output: Path) -> None:
    """`.env` sets Flower's address, port and credentials."""
    (tmp_path / ".env").write_text(f"FLOWER_ADDRESS=0.0.0.0\nFLOWER_BASIC_AUTH=ann:secret\nFLOWER_PORT={free_port()}\n")
    with running(flower("perdure flower"), output) as addresses:
        assert addresses == {_ANY}


@pytest.mark.parametrize("command", ["perdure flower", "celery -A perdure flower", "perdure up --port 1"])
@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("FLOWER_PORT", "many", "int"),
        ("FLOWER_PORT", "99999", "1 to 65535"),
        ("FLOWER_AUTO_REFRESH", "maybe", "bool"),
        ("FLOWER_CONF", "/nowhere/flower.py", "path of a file"),
    ],
)
def test_a_wrong_value_is_reported(  # noqa: PLR0917 (one parameter for each axis of the matrix)
    flower: Start, output: Path, command: str, variable: str, value: str, accepted: str
) -> None:
    """A wrong value of a Flower variable ends the program with a message, not a traceback or endless restarts."""
    message = refused(flower(command, **{variable: value}), output)

    assert f"{variable} is {value!r}" in message
    assert accepted in message


@pytest.mark.parametrize("command", ["perdure flower --port {}", "celery -A perdure flower --port={}"])
def test_flower_needs_the_broker_alone(flower: Start, output: Path, command: str) -> None:
    """Flower starts without a database URL or a model's key, so its container needs neither secret."""
    nothing = dict.fromkeys(("PERDURE_DATABASE_URL", "OPENAI_API_KEY", "OPENAI_BASE_URL"), "")
    process = flower(
        command.format(free_port()), PERDURE_MODEL="openai:gpt", PERDURE_EMBEDDER="openai:small", **nothing
    )
    with running(process, output) as addresses:
        assert addresses <= {"127.0.0.1", "::1"}


@pytest.mark.long
@pytest.mark.parametrize("command", ["perdure flower", "celery -A perdure flower"])
def test_it_ends_while_it_inspects_the_workers(flower: Start, output: Path, command: str) -> None:
    """SIGTERM ends Flower at once, also while a thread of it asks workers over the broker."""
    output.touch()
    process = flower(f"{command} --port={free_port()}")
    try:
        deadline, pause = time.monotonic() + _PATIENCE_S, threading.Event()
        while "Connected to" not in output.read_text() and time.monotonic() < deadline:
            pause.wait(0.01)
        process.terminate()
        process.join(_ENDS_WITHIN_S)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
