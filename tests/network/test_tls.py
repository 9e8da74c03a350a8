"""TLS to Redis, RabbitMQ and PostgreSQL: verified by default on every connection, in every spelling."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from flower.utils.broker import Broker
from pydantic import SecretStr

from perdure.application.queues import broker_url
from perdure.assembly import Addresses, addresses
from perdure.channels.http.stream import hub
from perdure.clock import SystemClock
from perdure.errors import SettingsError
from perdure.events.writer import EventWriter
from perdure.network.tls import divided, joined, normalised
from perdure.redis import client_url, connect
from perdure.resilience.circuit import Policy
from perdure.resilience.redis_circuits import FleetCircuits
from perdure.settings import Settings, StreamSettings
from perdure.workers.celery_application import make_app
from perdure.workers.publish.calls import CeleryCalls
from tests.tls import Authority, Proxy, proxy

pytestmark = pytest.mark.long

VERIFIED = ["", "ssl_cert_reqs=required", "ssl_cert_reqs=CERT_REQUIRED", "ssl_cert_reqs=CERT_OPTIONAL"]
POLICY = Policy(failure_threshold=3, cooldown_ms=60_000, half_open_max_probes=1)
UNVERIFIED = ["ssl_cert_reqs=none", "ssl_cert_reqs=CERT_NONE"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The authority that the installation trusts."""
    return Authority(tmp_path, "trusted")


@pytest.fixture
def socket(redis_url: str) -> str:
    """The unix socket of the test's Redis."""
    return client_url(redis_url).removeprefix("unix://").partition("?")[0]


@pytest.fixture
def genuine(authority: Authority, socket: str) -> Iterator[Proxy]:
    """Redis behind TLS, with a certificate of the trusted authority."""
    with proxy(authority.server(), socket) as made:
        yield made


@pytest.fixture(params=["unknown authority", "other host"])
def impostor(authority: Authority, socket: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """A server that has another certificate than the genuine one."""
    other = request.param == "other host"
    context = authority.server("other.example") if other else Authority(tmp_path, "unknown").server()
    with proxy(context, socket) as made:
        yield made


def where_of(url: str) -> Addresses:
    """The addresses of an installation whose Redis and broker are at `url`."""
    return addresses(Settings(_env_file=None, redis_url=SecretStr(url)), database=False)


def app_of(url: str) -> Celery:
    """The application of a worker whose Redis and broker are at `url`."""
    return make_app(Settings(_env_file=None), where_of(url), publisher=True)


def ping_stream(url: str) -> bool:
    """Ping as the gateway's hub of event streams does."""
    return asyncio.run(ping_with(lambda: hub._client(where_of(url).redis_url)))


def ping_as_flower(url: str) -> bool:
    """Ping as Flower's page of queues does."""
    app = app_of(url)
    uri = app.connection().as_uri(include_password=True)
    options = {"broker_options": app.conf.broker_transport_options, "broker_use_ssl": app.conf.broker_use_ssl}
    return asyncio.run(ping_with(lambda: Broker(uri, **options).redis))


async def ping_with(make: Callable[[], Any]) -> bool:
    """Ping with the asynchronous client that `make` creates."""
    async with make() as client:
        return bool(await client.ping())


def pinging(make: Callable[[str], Any]) -> Callable[[str], bool]:
    """A function that pings with the client that `make` creates."""

    def ping(url: str) -> bool:
        client = make(url)
        try:
            return bool(client.ping())
        finally:
            client.connection_pool.disconnect()

    return ping


def ping_broker(url: str) -> bool:
    """Ping as a worker's consumer and each publisher do."""
    with app_of(url).connection_for_write() as connection:
        return pinging(lambda _: connection.default_channel.client)(url)


PINGS: dict[str, Callable[[str], bool]] = {
    "caches": pinging(lambda url: connect(where_of(url).redis_url)),
    "caches, with a URL of Celery's": pinging(connect),
    "events": pinging(lambda url: EventWriter(where_of(url).redis_url, "p:", StreamSettings(), SystemClock())._client),
    "breakers": pinging(lambda url: FleetCircuits(where_of(url).redis_url, POLICY)._client),
    "streams": ping_stream,
    "broker": ping_broker,
    "results": pinging(lambda url: app_of(url).backend.client),
    "results of tools": pinging(
        lambda url: CeleryCalls.at(Settings(_env_file=None), where_of(url))._app.backend.client
    ),
    "Flower": ping_as_flower,
}


@pytest.mark.parametrize("client", PINGS)
def test_an_impostor_gets_no_command(authority: Authority, impostor: Proxy, client: str) -> None:
    """Each client verifies the authority and the host name, and sends nothing before."""
    with pytest.raises(Exception, match=r"(?i)certificate"):
        PINGS[client](f"rediss://localhost:{impostor.port}/0?ssl_ca_certs={authority.file}")
    assert not impostor.received


@pytest.mark.long
@pytest.mark.parametrize("client", PINGS)
@pytest.mark.parametrize("spelling", VERIFIED)
def test_each_client_takes_each_spelling(authority: Authority, genuine: Proxy, client: str, spelling: str) -> None:
    """The spellings of Celery and of redis-py work with each client, whichever library it uses."""
    query = "&".join(filter(None, [spelling, f"ssl_ca_certs={authority.file}"]))
    assert PINGS[client](f"rediss://localhost:{genuine.port}/0?{query}")


@pytest.mark.parametrize("client", PINGS)
def test_the_system_knows_no_test_authority(genuine: Proxy, client: str) -> None:
    """A URL without options is verified with the authorities of the system."""
    with pytest.raises(Exception, match=r"(?i)certificate"):
        PINGS[client](f"rediss://localhost:{genuine.port}/0")
    assert not genuine.received


@pytest.mark.long
@pytest.mark.parametrize("client", PINGS)
@pytest.mark.parametrize("spelling", UNVERIFIED)
def test_verification_can_be_switched_off(impostor: Proxy, client: str, spelling: str) -> None:
    """An operator may ask for a connection that is encrypted only."""
    assert PINGS[client](f"rediss://localhost:{impostor.port}/0?{spelling}")


def test_a_certificate_of_the_client_is_sent(authority: Authority, socket: str) -> None:
    """A server may require a certificate: `ssl_certfile` and `ssl_keyfile` name it."""
    context = authority.server()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.file)
    certificate, key = authority.issue("client.example")
    with proxy(context, socket) as made:
        url = f"rediss://localhost:{made.port}/0?ssl_ca_certs={authority.file}"
        for ping in PINGS.values():
            assert ping(f"{url}&ssl_certfile={certificate}&ssl_keyfile={key}")


@pytest.mark.parametrize("spelling", [*VERIFIED, *UNVERIFIED])
@pytest.mark.parametrize("scheme", ["amqps", "rediss"])
def test_an_application_passes_its_options_on(authority: Authority, scheme: str, spelling: str) -> None:
    """Perdure's parts in an application use the broker's options of the application, in a URL or in a setting."""
    query = "&".join(filter(None, [spelling, f"ssl_ca_certs={authority.file}"]))
    given = normalised(f"{scheme}://user:pass@localhost:1/0?{query}")
    bare, options = divided(given)
    assert options is not None
    app = Celery("shop", broker=bare, set_as_current=False)
    app.conf.broker_use_ssl = options
    assert joined(bare, options) == given
    assert broker_url(app).partition("?")[2] == given.partition("?")[2]


@pytest.mark.parametrize("host", ["localhost", "other.example"])
@pytest.mark.parametrize("known", [True, False])
def test_rabbitmq_is_verified(authority: Authority, tmp_path: Path, host: str, *, known: bool) -> None:
    """AMQP begins only after the certificate and the host name were verified."""
    with proxy((authority if known else Authority(tmp_path, "unknown")).server(host)) as made:
        url = f"amqps://guest:guest@localhost:{made.port}//?ssl_ca_certs={authority.file}"
        settings = Settings(_env_file=None, redis_url=SecretStr("redis://localhost:1"), broker_url=SecretStr(url))
        app = make_app(settings, addresses(settings, database=False), publisher=True)
        with pytest.raises(OSError, match=r"(?i)timed out|certificate"), app.connection_for_write() as connection:
            connection.transport.establish_connection()
        assert bytes(made.received[:4]) == (b"AMQP" if known and host == "localhost" else b"")


@pytest.mark.parametrize(
    ("variable", "url", "message"),
    [
        ("redis_url", "rediss://h/0?ssl_cert_reqs=maybe", "ssl_cert_reqs is 'maybe'; accepted: required, optional or"),
        ("broker_url", "rediss://h/0?ssl_cert_reqs=", "ssl_cert_reqs is ''; accepted: required, optional or"),
        ("broker_url", "amqps://h?ssl_cert_reqs=ask", "ssl_cert_reqs is 'ask'; accepted: required, optional or"),
        ("redis_url", "rediss://h?ssl_check_hostname=x", "ssl_check_hostname is 'x'; accepted: true or false"),
        ("redis_url", "rediss://h?ssl_cert_req=none", "ssl_cert_req is not an option of TLS; accepted: ssl_cert_reqs,"),
        ("broker_url", "amqps://h?ssl_password=x", "ssl_password is not an option of TLS; accepted: ssl_cert_reqs,"),
        ("redis_url", "redis://h?ssl_cert_reqs=none", "ssl_cert_reqs needs TLS: begin the URL with rediss://"),
        ("broker_url", "amqp://h?ssl_cert_reqs=none", "ssl_cert_reqs needs TLS: begin the URL with amqps://"),
        ("redis_url", "rediss://h?ssl_ca_certs=/none", r"ssl_ca_certs cannot be used \(No such file"),
        ("redis_url", "rediss://h?ssl_ca_certs=/etc/hosts", r"ssl_ca_certs cannot be used .*accepted: a readable file"),
        ("broker_url", "rediss://h?ssl_certfile=/none", r"ssl_certfile cannot be used \(No such file"),
        ("redis_url", "rediss://h?ssl_keyfile=/none", "ssl_keyfile needs ssl_certfile"),
        ("redis_url", "rediss://h?ssl_min_version=1", "ssl_min_version is '1'; accepted: 771, 772"),
        ("redis_url", "rediss://h?ssl_cert_reqs=none&ssl_cert_reqs=required", "an option of TLS is given twice"),
        ("database_url", "postgresql://h/d?sslmode=full", "sslmode is 'full'; accepted: disable, allow, prefer, req"),
        ("migrate_url", "postgresql://h/d?sslmode=REQUIRE", "sslmode is 'REQUIRE'; accepted: disable, allow, prefer"),
        ("database_url", "postgresql://h/d?sslmode=verify-full&sslrootcert=/none", r"sslrootcert cannot be used \(No"),
    ],
)
def test_a_bad_option_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, url: str, message: str) -> None:
    """A wrong option stops each program at its start. The message names the variable and what is accepted."""
    name = f"PERDURE_{variable.upper()}"
    monkeypatch.setenv(name, url)
    with pytest.raises(SettingsError, match=rf"{name} \(its value is not shown\) cannot be used: {message}"):
        Settings.load(_env_file=None)


def test_a_bad_pgsslmode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of PostgreSQL's client applies if the URL has no `sslmode`."""
    monkeypatch.setenv("PGSSLMODE", "full")
    Settings.load(_env_file=None, database_url="postgresql://h/d?sslmode=require")
    with pytest.raises(SettingsError, match=r"sslmode is 'full' \(from PGSSLMODE\); accepted: disable"):
        Settings.load(_env_file=None, database_url="postgresql://h/d")


@pytest.mark.parametrize("url", ["redis://h:1/0?protocol=2", "redis+socket:///tmp/x?virtual_host=1", "amqp://h//"])
def test_a_url_without_tls_is_unchanged(url: str) -> None:
    """Only the options of TLS are normalised."""
    assert normalised(url) == url
    assert divided(url) == (url, None)


def test_several_brokers_have_the_options_of_the_first(authority: Authority) -> None:
    """A broker URL may name several servers, which semicolons separate. A semicolon in a password separates none."""
    url = normalised(f"amqps://a:1;amqps://a:2?ssl_ca_certs={authority.file}")
    assert divided(url)[0] == "amqps://a:1;amqps://a:2"
    assert normalised("rediss://:a;b@h").startswith("rediss://:a;b@h?ssl_cert_reqs=required")


@pytest.mark.parametrize("url", ["amqp://a;amqps://a", "amqps://a;amqp://a"])
def test_brokers_with_and_without_tls_are_refused(url: str) -> None:
    """Kombu has one setting for all servers of a URL, so one of them would be asked without TLS, or in vain with it."""
    with pytest.raises(SettingsError, match=r"PERDURE_BROKER_URL .*begin each URL with amqps://"):
        Settings.load(_env_file=None, broker_url=url)


def test_one_name_of_several_brokers_is_verified() -> None:
    """The name is that of one server, not a piece of the list."""
    _, options = divided(normalised("amqps://a.example;amqps://A.EXAMPLE"))
    assert options is not None
    assert options["server_hostname"] == "a.example"


@pytest.mark.parametrize("options", [("", ""), ("?ssl_check_hostname=false", ""), ("", "?ssl_cert_reqs=none")])
def test_no_broker_is_verified_under_the_name_of_another(options: tuple[str, str]) -> None:
    """Kombu keeps the first server's name when it fails over: the second would need a certificate of the first."""
    first, second = options
    url = f"amqps://first.example{first};amqps://second.example{second}"
    with pytest.raises(
        SettingsError, match=r"PERDURE_BROKER_URL .*\(first.example, second.example\) under the name of one"
    ):
        Settings.load(_env_file=None, broker_url=url)


@pytest.mark.parametrize(
    "url",
    [
        "amqps://first.example?{0};amqps://second.example?{0}",
        "amqps://one.example:5671;amqps://one.example:5672",
        "rediss://first.example;rediss://second.example",
    ],
)
def test_brokers_that_need_no_other_name_are_accepted(url: str) -> None:
    """An operator may do without host names. redis-py verifies each server under its own name."""
    assert normalised(url.format("ssl_check_hostname=false")).count(";") == 1
