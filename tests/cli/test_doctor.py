"""`perdure doctor` reports the dangerous settings of servers and Celery applications."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from amqp.exceptions import AccessRefused, NotAllowed  # type: ignore[import-untyped]  # amqp carries no types
from pydantic import SecretStr
from redis import Redis
from sqlalchemy.engine import make_url

from perdure.application.dangers import application, dangers
from perdure.cli.inspect import server_settings
from perdure.errors import Unavailable
from perdure.redis import client_url, connect
from perdure.servers import redis
from perdure.settings import Settings
from perdure.workers.publish.wake import CeleryWaker
from tests.cli.conftest import Environment, Perdure
from tests.databases import Databases


@pytest.fixture
def server(redis_url: str) -> Iterator[Redis]:
    """The test's Redis; its settings are restored afterwards."""
    with Redis.from_url(client_url(redis_url)) as client:
        names = ("maxmemory-policy", "slowlog-log-slower-than", "appendonly")
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name in names:
            client.config_set(name, before[name])


def test_servers_as_perdure_starts_them_have_no_dangerous_setting(perdure: Perdure, server: Redis) -> None:
    """If no server has a dangerous setting, `doctor` exits with 0.

    The test first disables the append-only file of its Redis, because `doctor` would report that setting.
    """
    server.config_set("appendonly", "no")
    ended = perdure("doctor")
    assert (ended.returncode, ended.stdout) == (0, "No dangerous setting was found.\n"), ended.stderr


@pytest.mark.long
def test_each_dangerous_setting_is_named_with_its_fix(
    perdure: Perdure, environment: Environment, server: Redis, databases: Databases
) -> None:
    """If `doctor` finds dangerous settings, it exits with 1. The JSON names each setting with its risk and its fix."""
    server.config_set("appendonly", "yes")
    server.config_set("maxmemory-policy", "allkeys-lru")
    server.config_set("slowlog-log-slower-than", "10000")
    name = make_url(environment["PERDURE_DATABASE_URL"]).database
    for setting in ("synchronous_commit = off", "log_min_error_statement = error"):
        databases.administer(f"ALTER DATABASE {name} SET {setting}")

    ended = perdure("doctor", "--json")
    found = {each["setting"]: each for each in json.loads(ended.stdout)["findings"]}

    assert ended.returncode == 1
    assert set(found) == {
        "synchronous_commit is off",
        "log_min_error_statement is error",
        "maxmemory-policy is allkeys-lru",
        "appendonly is yes",
        "slowlog-log-slower-than is 10000",
    }
    assert all(each["risk"] and each["fix"] for each in found.values())
    assert "maxmemory-policy is allkeys-lru" in perdure("doctor").stdout


def test_a_broker_of_its_own_is_examined(
    perdure: Perdure, environment: Environment, server: Redis, tmp_path: Path
) -> None:
    """The queues are in the broker, so that its settings can lose messages, too. Its risks name it."""
    server.config_set("appendonly", "no")
    broker = redis.start(tmp_path / "broker")
    try:
        with connect(broker.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
            client.config_set("appendonly", "no")
        ended = perdure("doctor", "--json", env={**environment, "PERDURE_BROKER_URL": broker.url})
    finally:
        broker.stop()
    (found,) = json.loads(ended.stdout)["findings"]
    assert ended.returncode == 1
    assert found["setting"] == "maxmemory-policy is allkeys-lru"
    assert str(tmp_path) in found["where"]


@pytest.mark.parametrize(
    ("broker_url", "said"),
    [
        ("amqp://guest:hidden@127.0.0.1:1//", "The broker cannot be reached."),
        ("redis://:hidden@127.0.0.1:1/0", "Redis at 127.0.0.1:1 cannot be reached."),
        ("redis://:hidden@127.0.0.1:1/0;redis://:hidden@127.0.0.1:2/0", "Redis at 127.0.0.1:1 cannot be reached."),
    ],
)
def test_a_broker_that_is_down_is_unavailable(
    perdure: Perdure, environment: Environment, server: Redis, broker_url: str, said: str
) -> None:
    """The message names the broker's variable, and no password."""
    server.config_set("appendonly", "no")
    ended = perdure("doctor", env={**environment, "PERDURE_BROKER_URL": broker_url})
    assert ended.returncode == 3
    assert said in ended.stderr
    assert "PERDURE_BROKER_URL" in ended.stderr
    assert "hidden" not in ended.stderr


def test_a_redis_cluster_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str) -> None:
    """A node of a cluster answers PING, and refuses most of Celery's commands. The embedded Redis cannot be one."""
    settings = Settings(_env_file=None, data_dir=tmp_path, redis_url=SecretStr(redis_url))
    monkeypatch.setattr(Redis, "config_get", lambda _, name: {name: "yes"} if name == "cluster-enabled" else {})
    found = {each.setting: each.fix for each in server_settings._redis_servers(settings)}
    assert found["cluster-enabled is yes"] == "Use a Redis with cluster-enabled no."


@pytest.mark.parametrize("error", [AccessRefused(), NotAllowed()], ids=lambda error: type(error).__name__)
def test_a_rabbitmq_that_refuses_the_user_is_not_to_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str, error: Exception
) -> None:
    """RabbitMQ runs if it refuses a password, or knows no such virtual host."""
    settings = Settings(
        _env_file=None,
        data_dir=tmp_path,
        redis_url=SecretStr(redis_url),
        broker_url=SecretStr("amqp://a:b@localhost/c"),
    )
    monkeypatch.setattr(CeleryWaker, "failure", lambda _: error)
    with pytest.raises(Unavailable) as raised:
        list(server_settings._redis_servers(settings))
    said = "PERDURE_BROKER_URL must have a user, a password and a virtual host that RabbitMQ accepts."
    assert raised.value.message == f"The broker cannot be reached. {said}"
    assert raised.value.reason.startswith(type(error).__name__)


def test_a_standby_of_the_broker_may_be_down(
    perdure: Perdure, environment: Environment, server: Redis, redis_url: str
) -> None:
    """Of several brokers, one must work."""
    server.config_set("appendonly", "no")
    ended = perdure("doctor", env={**environment, "PERDURE_BROKER_URL": f"redis://127.0.0.1:1/0;{redis_url}"})
    assert ended.returncode == 0, ended.stderr


def test_what_the_role_cannot_see_is_said(perdure: Perdure, server: Redis) -> None:
    """An ordinary role sees no transactions of other roles. That is no dangerous setting."""
    server.config_set("appendonly", "no")
    ended = perdure("doctor")
    assert ended.returncode == 0
    assert "GRANT pg_read_all_stats" in ended.stderr


AGENTS = """
from perdure import Agent, McpServer, tool

def function(value: int) -> int:
    "{text}"

shop = Agent("shop", "You sell tea.", [tool(effect="pure", name=f"tool_{{n}}")(function) for n in range(10)])
remote = Agent("remote", "You help.", [McpServer("local", command=[{python!r}, {program!r}, "shelves"])])
fine = Agent("fine", "You help.")
"""


@pytest.mark.exhaustive
def test_tools_that_do_not_fit_are_named(environment: Environment, tmp_path: Path, server: Redis) -> None:
    """`doctor` connects the agents' MCP servers, and names the tools that do not fit an agent's prompts."""
    server.config_set("appendonly", "no")
    program = str(Path(__file__).parents[1] / "tools" / "mcp_server.py")
    (tmp_path / "shop.py").write_text(AGENTS.format(text="x" * 600, python=sys.executable, program=program))
    given = {
        "PERDURE_AGENTS": "shop",
        "PERDURE_MCP__COMMANDS": sys.executable,
        "PERDURE_MODEL_WINDOW": "1200",
        "PYTHONPATH": f"{environment['PYTHONPATH']}:{tmp_path}",
    }
    ended = Perdure({**environment, **given}, tmp_path)("doctor", "--json")
    assert ended.returncode == 1, ended.stderr
    shop, remote = json.loads(ended.stdout)["findings"]
    assert (shop["where"], remote["where"]) == ("agent shop", "agent remote")
    assert shop["setting"].endswith("of 10 tools do not fit 300 tokens")
    assert shop["risk"].startswith("a model finds them only with search_tools: tool_")
    assert "PERDURE_MODEL_WINDOW" in shop["fix"]
    left, of = (int(each) for each in re.findall(r"([0-9]+) of ([0-9]+) tools", remote["setting"])[0])
    assert (of, "local:shelf_d9" in remote["risk"]) == (40, True)
    assert 0 < left <= 40


def test_wrong_settings_of_models_are_named(environment: Environment, tmp_path: Path) -> None:
    """`doctor` checks what the programs check at their start."""
    wrong = {"PERDURE_ENDPOINTS__VLLM__URL": "http://127.0.0.1:1", "PERDURE_ENDPOINTS__VLLM__KIND": "vllm2"}
    ended = Perdure({**environment, **wrong}, tmp_path)("doctor")
    assert ended.returncode == 2
    assert "PERDURE_ENDPOINTS__VLLM__KIND is 'vllm2': accepted: openai, anthropic" in ended.stderr


APPLICATION = '''
import perdure
from celery import Celery

app = Celery("shop", broker={url!r}, set_as_current=False)
perdure.install(app)
app.conf.update(
    accept_content=["json", "pickle"],
    task_always_eager=True,
    broker_transport_options={{"visibility_timeout": 100}},
)

@app.task(name="shop.export", acks_late=True, time_limit=110, shared=False)
def export():
    """Take 110 s."""

@app.task(name="memory.decay", shared=False)
def decay():
    """Have a name of perdure's."""
'''


def test_the_dangerous_settings_of_an_application_are_named(
    environment: Environment, tmp_path: Path, redis_url: str, server: Redis
) -> None:
    """`doctor --app` reports dangerous settings of an application and of its Redis.

    The command also reports an application's task that has the name of one of perdure's tasks.
    """
    (tmp_path / "shop.py").write_text(APPLICATION.format(url=redis_url))
    server.config_set("maxmemory-policy", "allkeys-lru")
    ended = Perdure(environment, tmp_path)("doctor", "--app", "shop", "--json")
    found = [each["setting"] for each in json.loads(ended.stdout)["findings"]]
    assert ended.returncode == 1
    assert found == [
        "accept_content has pickle",
        "task_acks_late without task_reject_on_worker_lost",
        "task_always_eager is true",
        "a name of perdure's",
        "visibility_timeout is 100",
        "visibility_timeout is 100, under kombu's default keys",
        "maxmemory-policy is allkeys-lru",
    ]


def test_an_application_with_celerys_defaults_has_no_dangerous_setting(
    environment: Environment, tmp_path: Path, redis_url: str, server: Redis
) -> None:
    """An application with Celery's defaults gives status 0. A module that does not exist gives status 2."""
    (tmp_path / "shop.py").write_text(f"from celery import Celery\napp = Celery('shop', broker={redis_url!r})\n")
    run = Perdure(environment, tmp_path)
    assert run("doctor", "--app", "shop").returncode == 0
    missing = run("doctor", "--app", "nothing")
    assert (missing.returncode, "--app is 'nothing'" in missing.stderr) == (2, True)


BROKERS = """
from celery import Celery

sentinel = Celery("shop", broker="sentinel://127.0.0.1:26379", broker_transport_options={{"master_name": "m"}})
several = Celery("shop", broker="redis://127.0.0.1:1/0;{url}")
standby = Celery("shop", broker=["redis://127.0.0.1:1/0", "{url}"])
gone = Celery("shop", broker="redis://127.0.0.1:1/0;redis://127.0.0.1:2/0")
text = Celery("shop", broker="{url}", broker_transport_options={{"visibility_timeout": "600"}})
"""


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        ("sentinel", []),
        ("several", ["maxmemory-policy is allkeys-lru"]),
        ("standby", ["maxmemory-policy is allkeys-lru"]),
        ("gone", ["127.0.0.1:1 cannot be reached"]),
        ("text", ["visibility_timeout is '600'", "maxmemory-policy is allkeys-lru"]),
    ],
)
def test_each_form_of_a_broker_is_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str, server: Redis, *, app: str, expected: list[str]
) -> None:
    """Sentinel, several servers of which one is a standby, and an option of the wrong type end in no traceback."""
    (tmp_path / "brokers.py").write_text(BROKERS.format(url=redis_url))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "brokers", raising=False)
    server.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = [each.setting for each in dangers(application(f"brokers:{app}"))]
    except Unavailable as error:
        found = [error.message]
    assert len(found) == len(expected)
    assert all(part in whole for part, whole in zip(expected, found, strict=True))
