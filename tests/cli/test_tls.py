"""An installation whose Redis speaks TLS with a certificate of the operator's own authority."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from perdure.assembly import addresses
from perdure.redis import client_url
from perdure.settings import Settings
from perdure.workers.celery_application import make_app
from tests.cli.conftest import Environment, Perdure
from tests.tls import Authority, Proxy, proxy

_PATIENCE_S = 60


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The operator's authority."""
    return Authority(tmp_path, "own")


@pytest.fixture
def encrypted(authority: Authority, redis_url: str) -> Iterator[Proxy]:
    """Redis behind TLS."""
    with proxy(authority.server(), client_url(redis_url).removeprefix("unix://").partition("?")[0]) as made:
        yield made


@pytest.mark.long
def test_a_submission_is_awaited_over_tls(
    environment: Environment, tmp_path: Path, authority: Authority, encrypted: Proxy
) -> None:
    """A worker takes `turns.submit` from Redis over TLS, runs the turn, and stores the result that a program awaits.

    Its statistics, which Flower shows, have no password.
    """
    url = f"rediss://localhost:{encrypted.port}/0?ssl_ca_certs={authority.file}&ssl_password=of-the-key"
    perdure = Perdure({**environment, "PERDURE_REDIS_URL": url}, tmp_path)
    process = perdure.start("worker", "--concurrency", "4")
    try:
        settings = Settings(_env_file=None, redis_url=SecretStr(url))
        app = make_app(settings, addresses(settings, database=False))
        message = {"user_id": "ana", "text": "what is 12*7+5?"}
        accepted = app.send_task("turns.submit", kwargs=message, ignore_result=False).get(timeout=_PATIENCE_S)
        (shown,) = app.control.inspect(timeout=_PATIENCE_S, limit=1).stats().values()
        assert shown["broker"]["ssl"]["ssl_password"] == "********"
        assert "of-the-key" not in json.dumps(shown)
        app.close()
        ended = perdure("turns", "show", accepted["turn_id"], "--json")
        assert ended.returncode == 0, ended.stderr
    finally:
        process.terminate()
        process.join(_PATIENCE_S)
    assert process.exitcode == 0


def expired(authority: Authority) -> ssl.SSLContext:
    """A server whose certificate has expired."""
    return authority.server(valid_days=-0.5)


def unknown(authority: Authority) -> ssl.SSLContext:
    """A server of another authority."""
    return Authority(authority.file.parent, "unknown").server()


def closed(authority: Authority) -> ssl.SSLContext:
    """A server that requires a certificate of its clients."""
    context = authority.server()
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # refuses within the handshake
    return context


FAILURES: dict[str, tuple[Callable[[Authority], ssl.SSLContext], list[str]]] = {
    "expired": (expired, ["has expired", "Renew the server's certificate"]),
    "unknown": (unknown, ["certificate verify failed", "ssl_ca_certs in {variable} must name the server's authority"]),
    "closed": (closed, ["ssl_certfile and ssl_keyfile in {variable} must name a certificate that it accepts"]),
}


@pytest.mark.parametrize("variable", ["PERDURE_REDIS_URL", "PERDURE_BROKER_URL"])
@pytest.mark.parametrize("cause", FAILURES)
def test_doctor_names_the_cause_of_a_failure_of_tls(
    perdure: Perdure, environment: Environment, authority: Authority, variable: str, cause: str
) -> None:
    """The server runs, so the message names what the handshake failed on, and the option that helps."""
    make, said = FAILURES[cause]
    with proxy(make(authority)) as server:
        scheme = "rediss" if variable == "PERDURE_REDIS_URL" else "amqps"
        url = f"{scheme}://user:hidden@localhost:{server.port}?ssl_ca_certs={authority.file}"
        ended = perdure("doctor", env={**environment, variable: url})
    assert ended.returncode == 3
    for each in said:
        assert each.format(variable=variable) in ended.stderr
    assert "hidden" not in ended.stderr


@pytest.mark.parametrize("command", ["worker", "gateway", "beat", "flower", "doctor", "send hi", "breakers list"])
@pytest.mark.parametrize(
    ("variable", "url"),
    [
        ("PERDURE_REDIS_URL", "rediss://localhost/0?ssl_cert_reqs=maybe"),
        ("PERDURE_BROKER_URL", "amqps://localhost?ssl_cert_reqs=maybe"),
    ],
)
def test_a_bad_option_stops_each_command(
    environment: Environment, tmp_path: Path, command: str, variable: str, url: str
) -> None:
    """A command names the variable and the accepted values, and exits with status 2."""
    ended = Perdure({**environment, variable: url}, tmp_path)(*command.split())
    assert ended.returncode == 2
    assert f"{variable} (its value is not shown) cannot be used: ssl_cert_reqs is 'maybe'; accepted:" in ended.stderr


def test_doctor_names_connections_that_are_not_verified(
    environment: Environment, tmp_path: Path, authority: Authority, encrypted: Proxy
) -> None:
    """An encrypted connection whose server is not verified looks safe, so `doctor` names it.

    Also if the server cannot be reached, as the broker here.
    """
    redis = f"rediss://localhost:{encrypted.port}/0?ssl_ca_certs={authority.file}"
    servers = {
        "PERDURE_REDIS_URL": f"rediss://localhost:{encrypted.port}/0?ssl_cert_reqs=none",
        "PERDURE_BROKER_URL": "amqps://localhost?ssl_check_hostname=false",
    }
    perdure = Perdure(environment, tmp_path)
    ended = perdure("doctor", "--json", env={**environment, **servers})
    assert (ended.returncode, "The broker cannot be reached" in ended.stderr) == (3, True)
    found = {each["where"].partition(" at ")[0]: each["setting"] for each in json.loads(ended.stdout)["findings"]}
    assert found["PERDURE_REDIS_URL"] == "ssl_cert_reqs is none"
    assert found["PERDURE_BROKER_URL"] == "ssl_check_hostname is false"
    ended = perdure("doctor", "--json", env={**environment, "PERDURE_REDIS_URL": redis})
    assert "ssl_" not in ended.stdout
