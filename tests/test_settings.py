"""Invalid settings are refused with a message that says how to fix them."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from unittest.mock import Mock

import pytest
from kombu import Connection
from redis import ConnectionPool

from perdure.errors import SettingsError
from perdure.network.tls import split
from perdure.redis import client_url
from perdure.settings import Settings

WRONG = [
    ("PERDURE_DATABASE_URL", "mysql://somewhere/db", "postgresql://"),
    ("PERDURE_DATABASE_URL", "postgresql+asyncpg://somewhere/db", "postgresql+psycopg2://"),
    ("PERDURE_REDIS_URL", "http://somewhere", "redis://"),
    ("PERDURE_BROKER_URL", "foo", "amqp://"),
    ("PERDURE_BROKER_URL", "sqs://", "amqp://"),
    (
        "PERDURE_DATABASE_URL",
        "postgresql://here:abc/x",
        "a number from 1 to 65535, such as postgresql://localhost:5432",
    ),
    ("PERDURE_DATABASE_URL", "postgresql://here:99999/x", "a number from 1 to 65535"),
    ("PERDURE_DATABASE_URL", "postgresql://me:a%00b@here/x", "it has %00"),
    ("PERDURE_MIGRATE_URL", "postgresql://here/x?options=%00", "it has %00"),
    ("PERDURE_REDIS_URL", "redis://:hidden@here:abc/0", "a port from 1 to 65535, such as redis://localhost:6379"),
    ("PERDURE_REDIS_URL", "redis://here:99999/0", "a port from 1 to 65535"),
    ("PERDURE_REDIS_URL", "redis://here:0/0", "a port from 1 to 65535"),
    ("PERDURE_REDIS_URL", "redis://[::1/0", "the address of server 1 is malformed"),
    ("PERDURE_REDIS_URL", "redis://:a/password@here/0", "special characters of a password as %40"),
    ("PERDURE_REDIS_URL", "redis://here:6379/notadb", "the database of server 1 is 'notadb'; accepted: a number"),
    ("PERDURE_REDIS_URL", "rediss://here:6379?db=x", "the database of server 1 is 'x'; accepted: a number"),
    ("PERDURE_BROKER_URL", "amqp://me:hidden@here:abc//", "a port from 1 to 65535, such as amqp://localhost:5672"),
    ("PERDURE_BROKER_URL", "redis://one:1/0;redis://two:abc/0", "the address of server 2 is malformed"),
    ("PERDURE_BROKER_URL", "redis://one:1/0;redis://two:1/x", "the database of server 2 is 'x'"),
    ("PERDURE_REDIS_URL", "redis+socket:///run/redis.sock?db=x", "the database of server 1 is 'x'"),
    ("PERDURE_REDIS_URL", "redis://here/0?socket_timeout=5", "socket_timeout is not accepted in the query; accepted:"),
    ("PERDURE_REDIS_URL", "rediss://here/0?foo=bar", "whose names begin with ssl_, and db, username, password"),
    ("PERDURE_REDIS_URL", "redis+socket:///run/redis.sock?foo=bar", "foo is not accepted in the query"),
    ("PERDURE_BROKER_URL", "redis://one/0;redis://two/0?foo=bar", "foo is not accepted in the query"),
    ("PERDURE_BROKER_URL", "amqp://here//?heartbeat=10", "whose names begin with ssl_, and login_method"),
    ("PERDURE_DATABASE_URL", "postgresql://here/x?foo=bar", "foo is not accepted in the query; accepted: the options"),
    ("PERDURE_MIGRATE_URL", "postgresql://here/x?foo=bar", "of libpq, such as sslmode"),
    ("PERDURE_TELEGRAM__API_URL", "localhost", "PERDURE_TELEGRAM__API_URL is 'localhost': accepted: a URL that"),
    ("PERDURE_SLACK__API_URL", "localhost", "PERDURE_SLACK__API_URL is 'localhost': accepted: a URL that"),
    ("PERDURE_DISCORD__API_URL", "http://here:abc", "such as https://discord.com/api/v10"),
    ("PERDURE_METRICS__WORKER_ADDRESS", "not an address", "is 'not an address': accepted: an address or a host name"),
    ("PERDURE_METRICS__WORKER_ADDRESS", "127.0.0.1:9000", "such as 127.0.0.1, 0.0.0.0 or ::"),
    ("PERDURE_SECRET_KEY", "fifteen-letters", "is too short: accepted: 16 characters or more"),
    ("PERDURE_SECRET_KEY_BEFORE", "x", "is too short: accepted: 16 characters or more"),
    ("PERDURE_REDIS_PREFIX", "a/b:", "letters, digits"),
    ("PERDURE_REDIS_PREFIX", "{perdure}:", "letters, digits"),
    ("PERDURE_REDIS_PREFIX", "p" * 65, "letters, digits"),
    ("PERDURE_TIMEZONE", "Mars/Olympus", "IANA"),
    ("PERDURE_MODEL_TIMEOUT_S", "0", "greater than 0"),
    ("PERDURE_MODEL_TIMEOUT_S", "nan", "finite"),
    ("PERDURE_MODEL_TIMEOUT_S", "inf", "finite"),
    ("PERDURE_TURN__MAX_STEPS", "many", "integer"),
    ("PERDURE_TURN__MAX_ATTEMPTS", "0", "greater than or equal to 1"),
    ("PERDURE_TURN__ON_BUSY", "shrug", "'enqueue', 'reject', 'interrupt', 'merge' or 'steer'"),
    ("PERDURE_TURN__HEARTBEAT_S", "29", "PERDURE_TURN__LEASE_S"),
    ("PERDURE_TURN", "5", "PERDURE_TURN__MAX_STEPS"),
    ("PERDURE_TURN", "long", "PERDURE_TURN__MAX_STEPS"),
    (
        "PERDURE_API_KEYS",
        "a-key-of-16-or-so,sha256:abc",
        "entry 2 is sha256:… without 64 hexadecimal digits; accepted:",
    ),
    ("PERDURE_API_KEYS", "fifteen-letters", "entry 1 has a key of fewer than 16 characters; accepted:"),
    ("PERDURE_ADMIN_KEYS", "acme=fifteen-letters", "entry 1 has a key of fewer than 16 characters after TENANT="),
    ("PERDURE_ADMIN_KEYS", "acme=file:/run/secrets/keys", "entry 1 is TENANT=file:…, which is not accepted here"),
    ("PERDURE_API_KEYS", "acme=sha256:" + "g" * 64, "64 hexadecimal digits"),
    ("PERDURE_ADMIN_KEYS", "sha256:" + "g" * 64, "64 hexadecimal digits"),
    ("PERDURE_SESSION__SCOPE", "planet", "'user' or 'channel'"),
    ("PERDURE_GUARD__MAX_CHARS", "-1", "greater than or equal to 1"),
    ("PERDURE_BREAKER__HALF_OPEN_MAX_PROBES", "0", "greater than or equal to 1"),
    ("PERDURE_RETRY__JITTER", "1.5", "less than or equal to 1"),
    ("PERDURE_RETRY__MULTIPLIER", "0.5", "greater than or equal to 1"),
    ("PERDURE_WEBHOOK_SECRET", "whsec_c2hvcnQ=", "base64 of at least 24 bytes"),
    ("PERDURE_WEBHOOK_SECRET", "c2VjcmV0IG9mIG1vcmUgdGhhbiAyNCBieXRlcw==", "whsec_ and base64"),
    ("PERDURE_WEBHOOK_SECRET", "whsec_not~base64~not~base64~not~base64", "secret 1 is malformed"),
    ("PERDURE_WEBHOOK_SECRET", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw whsec_", "secret 2 is malformed"),
    ("PERDURE_WEBHOOK_SECRET", " , ", "it is empty"),
    ("PERDURE_SHUTDOWN__HARD_EXIT_S", "1", "PERDURE_SHUTDOWN__DRAIN_S"),
    (
        "PERDURE_ENDPOINTS__VLLM__URL",
        "ftp://here",
        "PERDURE_ENDPOINTS__VLLM__URL is 'ftp://here': accepted: a URL that",
    ),
    ("PERDURE_ENDPOINTS__VLLM__URL", "http://", "such as http://127.0.0.1:8000/v1"),
    ("PERDURE_ENDPOINTS__VLLM__URL", "http://here:99999", "such as http://127.0.0.1:8000/v1"),
    ("PERDURE_ENDPOINTS__A.B__URL", "http://here", "a name has 1 to 64"),
    ("PERDURE_ENDPOINTS__VLLM__THINKS", "maybe", "valid boolean"),
    ("PERDURE_ENDPOINTS__VLLM__URL", "http://me:hidden@here/v1", "(its value is not shown): accepted: a URL that"),
    ("PERDURE_ENDPOINTS__VLLM__THIKNS", "true", "accepted: PERDURE_ENDPOINTS__NAME__URL, PERDURE_ENDPOINTS__NAME__KEY"),
    ("PERDURE_ENDPOINTS__VLLM", "5", "PERDURE_ENDPOINTS__NAME__URL"),
    ("PERDURE_ENDPOINTS", "http://here", "PERDURE_ENDPOINTS__NAME__URL"),
    ("PERDURE_ENDPOINTS", '[{"vllm": {"key": "sk"}}]', "PERDURE_ENDPOINTS is a group"),
    ("PERDURE_MODEL_SETTINGS", '{"temperature": ', "a JSON object, such as"),
    ("PERDURE_MODEL_SETTINGS", "[1]", "a JSON object, such as"),
    ("PERDURE_MODEL_WINDOW", "0", "greater than or equal to 1"),
    # Larger values would fail at each statement that computes with them.
    ("PERDURE_SESSION__IDLE_TIMEOUT_S", "1000000000000", "less than or equal to 3153600000"),
    ("PERDURE_TURN__PRIORITY_AGING_S", "1000000000000", "less than or equal to 3153600000"),
    ("PERDURE_TURN__USER_CONCURRENCY", "99999999999", "less than or equal to 1000000000"),
    ("PERDURE_GUARD__PER_MINUTE", "99999999999", "less than or equal to 1000000000"),
    ("PERDURE_CASEBANK__INACTIVE_DAYS", "9999999", "less than or equal to 36500"),
]


@pytest.mark.parametrize(("name", "value", "accepted"), WRONG, ids=[f"{name}={value}" for name, value, _ in WRONG])
def test_a_wrong_value_is_named_with_what_is_accepted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    """The error message names the variable and the accepted values."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings.load(_env_file=None)
    assert name in str(caught.value)
    assert accepted in str(caught.value)
    assert "Settings" not in str(caught.value), "the message names variables, not classes"


def test_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error message does not contain a URL, because the URL may contain a password and the message is logged."""
    monkeypatch.setenv("PERDURE_DATABASE_URL", "mysql://someone:secret@somewhere/db")
    with pytest.raises(SettingsError) as caught:
        Settings.load(_env_file=None)
    assert "secret" not in str(caught.value)


def test_an_unknown_setting_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An unknown variable is logged but not refused, because a later release may have a setting with this name."""
    monkeypatch.setenv("PERDURE_TURN__MAXSTEPS", "3")
    monkeypatch.setenv("PERDURE_CASEBANK__OF_LATER", "auto")
    with caplog.at_level(logging.WARNING):
        assert Settings.load(_env_file=None).turn.max_steps == 15
    reported = {record.getMessage().split()[0] for record in caplog.records}
    assert reported >= {"PERDURE_CASEBANK__OF_LATER", "PERDURE_TURN__MAXSTEPS"}


def test_endpoints_have_names_in_any_case(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The variables of endpoints contain a name, and are settings."""
    monkeypatch.setenv("PERDURE_ENDPOINTS__VLLM__URL", "http://127.0.0.1:8000/v1")
    monkeypatch.setenv("PERDURE_ENDPOINTS__VLLM__KEY", "sk-of-vllm")
    monkeypatch.setenv("PERDURE_ENDPOINTS__My_Ollama__URL", "http://127.0.0.1:11434/v1")
    with caplog.at_level(logging.WARNING):
        endpoints = Settings.load(_env_file=None).endpoints
    assert {name: each.url for name, each in endpoints.items()} == {
        "vllm": "http://127.0.0.1:8000/v1",
        "my_ollama": "http://127.0.0.1:11434/v1",
    }
    assert not caplog.records
    assert "sk-of-vllm" not in repr(endpoints)


def test_an_endpoint_without_a_url_says_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint needs a URL. The error does not contain the key."""
    monkeypatch.setenv("PERDURE_ENDPOINTS__VLLM__KEY", "sk-of-vllm")
    with pytest.raises(SettingsError) as caught:
        Settings.load(_env_file=None)
    assert str(caught.value).startswith("PERDURE_ENDPOINTS__VLLM__URL is not set: set it to the server's base URL")
    assert "sk-of-vllm" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERDURE_ENDPOINTS__VLLM__URL", "ftp://me:secret@here"),
        ("PERDURE_ENDPOINTS", '[{"vllm": {"key": "secret"}}]'),
        ("PERDURE_MODEL_SETTINGS", '{"extra_headers": {"x-key": "secret"'),
        ("PERDURE_REDIS_URL", "redis://me:pass?a-secret@here/0"),
        ("PERDURE_REDIS_URL", "redis://me?a-secret@here/0"),
        ("PERDURE_REDIS_URL", "redis://here/0?foo=secret"),
        ("PERDURE_DATABASE_URL", "postgresql://here/x?foo=secret"),
    ],
)
def test_keys_in_wrong_values_are_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A wrong value that may contain a password or a key is not shown, because the message is logged."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=name) as caught:
        Settings.load(_env_file=None)
    assert "secret" not in str(caught.value)


def test_the_signing_key_is_made_once(tmp_path: Path) -> None:
    """The signing key is created once. Only the owner of its file may read the file."""
    settings = Settings(_env_file=None, data_dir=tmp_path)
    key = settings.signing_key()
    assert len(key) == 64
    assert Settings(_env_file=None, data_dir=tmp_path).signing_key() == key
    assert ((tmp_path / "secret.key").stat().st_mode & 0o777) == 0o600


def test_the_webhook_secret_is_made_once(tmp_path: Path) -> None:
    """The webhook secret is created once. Its file contains the text that receivers configure (`whsec_...`)."""
    settings = Settings(_env_file=None, data_dir=tmp_path)
    (key,) = settings.webhook_keys()
    assert len(key) == 32
    assert Settings(_env_file=None, data_dir=tmp_path).webhook_keys() == (key,)
    path = tmp_path / "webhook.secret"
    assert path.read_text() == "whsec_" + base64.b64encode(key).decode()
    assert (path.stat().st_mode & 0o777) == 0o600


def test_a_malformed_webhook_secret_file_is_named(tmp_path: Path) -> None:
    """The error about a malformed secret file contains the file's path, but not the file's content."""
    (tmp_path / "webhook.secret").write_text("whsec_0123")
    with pytest.raises(SettingsError, match=r"webhook\.secret cannot be used: secret 1 is malformed") as caught:
        Settings(_env_file=None, data_dir=tmp_path).webhook_keys()
    assert "0123" not in str(caught.value)


@pytest.mark.parametrize(("content", "why"), [(b"\n", "it is empty"), (b"\xff\xfe", "it is not UTF-8")])
@pytest.mark.parametrize("variable", ["PERDURE_SECRET_KEY", "PERDURE_WEBHOOK_SECRET"])
def test_a_damaged_file_of_a_secret_is_named(tmp_path: Path, variable: str, content: bytes, why: str) -> None:
    """With an empty key, everyone could sign tokens."""
    for name in ("secret.key", "webhook.secret"):
        (tmp_path / name).write_bytes(content)
    settings = Settings(_env_file=None, data_dir=tmp_path)
    with pytest.raises(SettingsError, match=f"{variable} is not set, and the file .* cannot be used: {why}"):
        settings.signing_key() if variable == "PERDURE_SECRET_KEY" else settings.webhook_keys()


@pytest.mark.parametrize("place", ["a file", "a closed directory"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """The directory may be a file, or belong to another account."""
    path = tmp_path / "data"
    path.touch()
    if place == "a closed directory":
        monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError(13, "Permission denied")))
    reason = "Not a directory|File exists" if place == "a file" else "Permission denied"
    with pytest.raises(SettingsError, match=f"{path}/secret.key, cannot be used: ({reason}); set PERDURE_SECRET_KEY"):
        Settings(_env_file=None, data_dir=path).signing_key()


def test_a_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error message about a secret does not contain the secret, because the message is logged."""
    monkeypatch.setenv("PERDURE_WEBHOOK_SECRET", "whsec_too+short")
    with pytest.raises(SettingsError) as caught:
        Settings.load(_env_file=None)
    assert "too+short" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PERDURE_DATABASE_URL", "postgresql:///x?host=/run/postgresql"),
        ("PERDURE_DATABASE_URL", "postgresql+psycopg2://me:p%40ss@[::1]:5432/x"),
        ("PERDURE_REDIS_URL", "redis://"),
        ("PERDURE_REDIS_URL", "redis://:a;b@here/15"),
        ("PERDURE_REDIS_URL", "redis://[::1]:6379?db=2"),
        ("PERDURE_REDIS_URL", "redis+socket:///run/redis.sock?virtual_host=2"),
        ("PERDURE_BROKER_URL", "amqp://me:secret@here:5672//"),
        ("PERDURE_BROKER_URL", "amqp://here/a-virtual-host"),
        ("PERDURE_BROKER_URL", "redis://one:1/0;redis://two:2/0"),
        ("PERDURE_TELEGRAM__API_URL", "http://127.0.0.1:8081"),
        ("PERDURE_METRICS__WORKER_ADDRESS", "10.0.0.1"),
        ("PERDURE_METRICS__WORKER_ADDRESS", "::"),
        ("PERDURE_METRICS__WORKER_ADDRESS", "fe80::1%eth0"),
        ("PERDURE_METRICS__WORKER_ADDRESS", "worker-1.example"),
        ("PERDURE_SECRET_KEY", "k" * 16),
    ],
)
def test_an_address_of_any_form_is_accepted(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Sockets, IPv6, virtual hosts, escaped passwords and several brokers are no mistakes."""
    monkeypatch.setenv(name, value)
    Settings.load(_env_file=None)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("redis://here?db=5&password=a%40b", "redis://:a%40b@here/5"),
        ("redis://here:1/0?username=seq&password=S/1", "redis://seq:S%2F1@here:1/0"),
        ("redis://me:mine@here/3?db=1&username=you&password=yours", "redis://me:mine@here/1"),
        ("rediss://here/0?ssl_cert_reqs=none&db=3", "rediss://here/3?ssl_cert_reqs=none&ssl_check_hostname=false"),
        ("redis+socket:///run/r.sock?db=2&password=x", "redis+socket://:x@/run/r.sock?virtual_host=2"),
        ("redis+socket:///run/r.sock?virtual_host=2", "redis+socket:///run/r.sock?virtual_host=2"),
        ("redis://one?db=1;redis://two?password=b", "redis://one/1;redis://:b@two"),
    ],
)
def test_options_of_redis_are_moved_to_where_all_libraries_read_them(
    monkeypatch: pytest.MonkeyPatch, given: str, spelled: str
) -> None:
    """redis-py reads a database and a password in the query, and kombu and Celery would end the worker."""
    monkeypatch.setenv("PERDURE_BROKER_URL", given)
    found = Settings.load(_env_file=None).broker_url
    assert found is not None
    assert found.get_secret_value() == spelled
    Connection(found.get_secret_value())
    for each in split(found.get_secret_value()):
        wanted, read = (
            ConnectionPool.from_url(client_url(url)).connection_kwargs
            for url in (split(given)[split(spelled).index(each)], each)
        )
        assert read.get("db", 0) == wanted.get("db", 0)
        assert read.get("password") == wanted.get("password")
        assert read.get("username") == wanted.get("username")
