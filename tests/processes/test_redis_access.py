"""perdure with a Redis user that has the documented ACL, and with users that lack a part of it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis import Redis

from perdure.network.queues import QUEUES
from perdure.observe.redis_access import acl_rule, denied
from perdure.observe.servers import RedisServer
from perdure.redis import client_url, connect
from perdure.servers import redis
from tests.cli.conftest import Environment, Perdure, _environment
from tests.processes.gateway import CommandProcess, GatewayProcess
from tests.repository.source import ROOT, read

_ALL = re.MULTILINE | re.DOTALL

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Redis]:
    """A Redis of the test's own, whose users are the test's."""
    started = redis.start(tmp_path / "redis")
    with Redis.from_url(client_url(started.url)) as client:
        client.config_set("appendonly", "no")
        yield client
    started.stop()


def _acl(server: Any, *arguments: str) -> None:
    server.execute_command("ACL", *arguments)


def _url(server: Redis, user: str, rule: str) -> str:
    _acl(server, "SETUSER", user, "reset", "on", ">secret", *rule.split())
    path = server.get_connection_kwargs()["path"]
    return f"redis+socket://{path}?username={user}&password=secret"


def test_the_documented_rule_is_the_one_that_is_tested() -> None:
    """An operator copies the rule from the page or from `perdure doctor`."""
    (documented,) = re.findall(
        r'^redis-cli ACL SETUSER perdure on ">\$PASSWORD" (.+?)\n```', read("docs/operating.md"), _ALL
    )
    assert shlex.split(documented.replace("\\\n", "")) == acl_rule("perdure:").split()


@pytest.mark.parametrize(
    ("rule", "lacking"),
    [
        (acl_rule("perdure:"), set()),
        (f"{acl_rule('perdure:')} -evalsha", {"command EVALSHA"}),
        (f"{acl_rule('perdure:')} -multi", {"command MULTI"}),
        (acl_rule("perdure:").replace("~turns*", "~turns"), {r"key turns\x06\x169"}),
        (acl_rule("perdure:").replace("~_kombu.binding*", ""), {"key _kombu.binding_deadlines"} | {
            f"key _kombu.binding.{queue}" for queue in QUEUES
        }),
        (acl_rule("perdure:").replace("&perdure:*", ""), {"channel perdure:events"}),
        (
            acl_rule("perdure:").replace("&/0.perdure:celery.pidbox", "&/*"),
            {"channel /0.perdure:celery.pidbox"},
        ),
    ],
)  # fmt: skip
def test_what_a_user_lacks_is_found(server: Redis, rule: str, lacking: set[str]) -> None:
    """Also the priorities' keys of a queue, and the patterns that Redis compares literally. No command has run."""
    with connect(_url(server, "app", rule)) as client:
        assert set(denied(client, "perdure:", is_broker=True)) == lacking
    assert server.dbsize() == 0


def test_a_server_that_is_not_the_broker_needs_no_queues(server: Redis) -> None:
    """With RabbitMQ, Redis has perdure's own keys and Celery's results."""
    url = _url(server, "app", "~perdure:* ~celery-task-meta-* resetchannels &perdure:* &celery-task-meta-* +@all")
    with connect(url) as client:
        assert denied(client, "perdure:", is_broker=False) == []
        assert "key turns" in denied(client, "perdure:", is_broker=True)


def test_status_names_what_a_user_lacks(server: Redis) -> None:
    """Without EVALSHA, Redis accepts writes, and no worker fetches a task."""
    state = RedisServer("redis", _url(server, "app", f"{acl_rule('perdure:')} -evalsha"), "perdure:", is_broker=True)
    read_state = state.read()
    state.close()
    assert read_state.fault == (
        "Redis denies perdure's user the command EVALSHA: `perdure doctor` shows the ACL rule that suffices."
    )


@pytest.fixture
def restricted(tmp_path: Path, database_url: str, server: Redis) -> Environment:
    """The environment of an installation whose Redis user has the documented rule."""
    url = _url(server, "perdure", acl_rule("perdure:"))
    return {**_environment(tmp_path), "PERDURE_DATABASE_URL": database_url, "PERDURE_REDIS_URL": url}


@pytest.mark.long
def test_the_documented_rule_suffices(server: Redis, restricted: Environment, tmp_path: Path) -> None:
    """A worker, a gateway and a beat run, a turn is answered, and Redis has denied nothing.

    `CLIENT SETINFO` is redis-py's, whose refusal redis-py ignores.
    """
    perdure = Perdure({**restricted, "PERDURE_SNAPSHOTS": "redis"}, tmp_path)
    gateway, worker, beat = GatewayProcess(perdure), CommandProcess(perdure), CommandProcess(perdure)
    processes = (gateway, worker, beat)
    try:
        worker.run("worker")
        beat.run("beat")
        gateway.start()
        sent = httpx2.post(f"{gateway.url}/v1/messages", json={"user_id": "ana", "text": "hello"}).json()
        events = httpx2.get(f"{gateway.url}/v1/turns/{sent['turn_id']}/events", timeout=30).text
        assert "event: done" in events, events
        answered = perdure("send", "remember that I have two cats", "--wait", "30")
        assert answered.returncode == 0, answered.stdout + answered.stderr
        assert httpx2.get(f"{gateway.url}/readyz").status_code == 200
        ping = [sys.executable, "-m", "celery", "-A", "perdure", "inspect", "ping"]
        pinged = subprocess.run(ping, env=restricted, cwd=ROOT, capture_output=True, check=False, timeout=60)
        assert pinged.returncode == 0, pinged.stderr
        for command in (("status",), ("doctor",), ("drain", "--end-sessions")):
            ended = perdure(*command)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        for each in processes:
            each.stop()
    finally:
        for each in processes:
            each.kill()
    assert {each["object"] for each in server.acl_log()} <= {"client", "client|setinfo"}


def test_doctor_shows_the_rule(server: Redis, restricted: Environment, tmp_path: Path) -> None:
    """After the command that the finding names, nothing is lacking."""
    perdure = Perdure(restricted, tmp_path)
    _acl(server, "SETUSER", "perdure", "-evalsha", "resetkeys", "~perdure:*")
    (found,) = json.loads(perdure("doctor", "--json").stdout)["findings"]
    assert found["setting"].startswith("the ACL denies perdure: command EVALSHA, key celery-task-meta-0, key ingress")
    _acl(server, *found["fix"].removeprefix("ACL ").split())
    assert perdure("doctor").returncode == 0
