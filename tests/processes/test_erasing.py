"""After an erasure, no file, Redis key, table or log contains a text of the user.

The tests use the embedded servers of `perdure up`. docs/operating.md ("What erasing reaches") documents the files
that these tests exclude, and how long a text remains in them.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psycopg2
import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import Connection

from perdure.servers import redis
from tests.cli.conftest import Perdure
from tests.databases import engine_of
from tests.models.openai_server import Status, Step, Wire
from tests.processes.faults import wait_until
from tests.processes.gateway import serving
from tests.processes.installation import Installation
from tests.processes.model_server import ModelServer
from tests.processes.nodes import PostgresServer, RedisContainer

SECRET = "zyxomma"
"""A word that the erased user's id and all texts of the user contain."""

USER = f"user-{SECRET}"
OTHER, KEPT = "user-other", "quokka"

SETTINGS = {
    "PERDURE_AGENTS": "tests.processes.confidant",
    "PERDURE_TURN__MAX_ATTEMPTS": "1",
    "PERDURE_CONSOLIDATION__MIN_TURNS": "1",
    "PERDURE_RETRY__MAX_ATTEMPTS": "1",
    "PERDURE_GUARD__MAX_CHARS": "500",
    "PERDURE_FILES__ROW_BYTES": "1024",
}

EXCLUDED = ("postgres/data/pg_wal", "postgres/data/base")
"""Directories of PostgreSQL's write-ahead log and table files, which still contain deleted rows for some time."""


KINDS = {
    "computed instructions": "turns WHERE instructions",
    "answers to questions": "tool_effects WHERE payload::text",
    "what other agents say": "messages JOIN sessions USING (session_id) WHERE depth > 0 AND content",
    "references to files": "messages WHERE opaque::text LIKE '%%perdure-file%%' AND opaque::text",
}
"""Texts that only some turns have, as a table and an expression."""


class Quoting(ModelServer):
    """A model server that refuses some texts with an error that quotes them."""

    def answer(self, body: Wire) -> Step:
        """The answer to a prompt."""
        newest = str(body["messages"][-1]["content"])
        return Status(400, message=f"cannot answer {newest}") if newest.startswith("refuse:") else super().answer(body)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The installation's data directory."""
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[PostgresServer]:
    """The installation's PostgreSQL."""
    data.mkdir()
    made = PostgresServer(data / "postgres")
    yield made
    made.stop()


@pytest.fixture
def installation(server: PostgresServer, data: Path, tmp_path: Path) -> Iterator[Installation]:
    """An installation with its own embedded servers and one worker; all logs are under the data directory."""
    broker, model_server = RedisContainer("redis", data / "redis"), Quoting()
    with model_server.server:
        made = Installation(server.url, broker, model_server, tmp_path)
        made.environment |= {**SETTINGS, "PERDURE_FILES__URL": f"file://{data / 'files'}"}
        made.directory = data  # where workers write their logs
        made.worker("--task-events").container.ready()
        yield made
        made.close()
        model_server.close()
    broker.teardown()


@pytest.fixture
def perdure(installation: Installation, tmp_path: Path) -> Perdure:
    """Runs `perdure` commands and the gateway."""
    return Perdure(installation.environment, tmp_path)


class UserData:
    """Sends texts of one user through every entry point; each text contains `word`."""

    def __init__(self, client: httpx2.Client, installation: Installation, user: str, word: str) -> None:
        self._client = client
        self._installation = installation
        self.user = user
        self.word = word

    def by_http(self, text: str, **more: Any) -> dict[str, Any]:
        """Send a message; returns its settled turn."""
        body = {"user_id": self.user, "text": text, "agent": "tester", **more}
        accepted = self._client.post("/v1/messages", json=body).raise_for_status().json()
        turn: dict[str, Any] = self._client.get(f"/v1/turns/{accepted['turn_id']}?wait=20").json()
        assert turn["status"] in {"done", "failed"}, turn
        return turn

    def parked(self, text: str) -> dict[str, Any]:
        """Send a message; returns its turn, which waits for the user."""
        message = {"user_id": self.user, "text": text, "agent": "tester"}
        accepted = self._client.post("/v1/messages", json=message).json()

        def waiting() -> dict[str, Any] | None:
            turn: dict[str, Any] = self._client.get(f"/v1/turns/{accepted['turn_id']}").json()
            return turn if turn["status"] == "parked" else None

        return wait_until(waiting, "the turn waits for the user")

    def asked(self) -> None:
        """Answer a question, in words and as a value, and leave the last one open."""
        word = self.word
        self.parked(f"coffee: {word}")
        assert self.by_http(f"{word}, of course")["seq"] == self.by_http(f"After {word}")["seq"] - 1
        question = self.parked(f"coffee: {word} again")
        body = {"call_id": question["waiting_for"]["call_id"], "result": f"as a value {word}"}
        self._client.post(f"/v1/turns/{question['turn_id']}/results", json=body).raise_for_status()
        assert self._client.get(f"/v1/turns/{question['turn_id']}?wait=20").json()["status"] == "done"

    def steered(self) -> None:
        """Send a message that joins a turn, whose progress is followed."""
        text = f"pure: {self.word} is steered"
        gate = self._installation.model_server.gate(text)
        post = partial(self._client.post, "/v1/messages")
        first = post(json={"user_id": self.user, "text": text, "agent": "tester"}).json()
        gate.wait()
        with self._client.stream("GET", f"/v1/turns/{first['turn_id']}/events") as response:
            steering = {"user_id": self.user, "text": f"And {self.word}!", "agent": "tester", "on_busy": "steer"}
            assert post(json=steering).status_code == 202
            gate.opened.set()
            kinds = [line.partition(": ")[2] for line in response.iter_lines() if line.startswith("event: ")]
        assert "progress" in kinds
        said = self._client.get(f"/v1/sessions/{first['session_id']}/messages").json()
        assert f"And {self.word}!" in [each["content"] for each in said if each["turn_id"] == first["turn_id"]]

    def with_files(self) -> None:
        """Send a file that a row stores, upload one that no message has, and send one that is refused."""
        word, user = self.word, self.user
        encoded = base64.b64encode(f"file of {word}".encode()).decode()
        parts = [{"type": "text", "text": f"see {word}"}, {"type": "file", "data": encoded, "name": f"{word}.txt"}]
        accepted = self._client.post("/v1/messages", json={"user_id": user, "parts": parts}).raise_for_status().json()
        assert self._client.get(f"/v1/turns/{accepted['turn_id']}?wait=20").json()["status"] == "done"
        upload = partial(self._client.post, "/v1/files", params={"user_id": user, "name": word})
        assert upload(content=f"unused {word}".encode()).status_code == 201
        assert upload(content=b"GIF89a" + word.encode()[:1] + bytes(2)).status_code == 400

    def refused_by_http(self) -> None:
        """Send messages that are refused."""
        word, post = self.word, partial(self._client.post, "/v1/messages")
        assert post(json={"user_id": self.user, "text": word * 200}).status_code == 413
        assert post(json={"user_id": self.user, "text": word, "nonsense": word}).status_code == 400
        assert post(content=f'{{"user_id": "{self.user}", "text": "{word}').status_code == 400
        self.by_http(f"once {word}", message_id="once")
        again = {"user_id": self.user, "text": f"twice {word}", "message_id": "once"}
        assert post(json=again).status_code == 409

    def by_celery(self) -> list[str]:
        """Send accepted, refused and unreadable submissions; returns the errors of the refused submissions."""
        url, user, word = self._installation.environment["PERDURE_BROKER_URL"], self.user, self.word
        app = Celery("foreign", broker=url, backend=url, set_as_current=False)
        submit = partial(app.send_task, "turns.submit", queue="ingress")
        accepted = submit(kwargs={"user_id": user, "text": f"submitted {word}"}).get(timeout=20)
        refused = [
            submit(kwargs={"user_id": user, "text": word, "on_busy": word}),
            submit(kwargs={"user_id": user, "text": word * 200}),
            submit(args=[user, word]),
        ]
        app.send_task("sessions.end", kwargs={"session_id": word}, queue="sessions", ignore_result=False)
        with app.producer_pool.acquire() as producer:
            headers = {"task": "turns.submit", "id": "unreadable"}
            for content_type in ("application/json", "application/x-python-serialize"):
                producer.publish(
                    f"[[{word}", headers=headers, routing_key="ingress", exchange="ingress",
                    content_type=content_type, content_encoding="utf-8",
                )  # fmt: skip
        errors = [str(each.get(timeout=20, propagate=False)) for each in refused]
        self._installation.settled(accepted["turn_id"])
        app.close()
        return errors


def live(user_data: UserData, installation: Installation, perdure: Perdure, directory: Path) -> list[str]:
    """Send texts through every entry point; returns the errors of refused submissions."""
    word = user_data.word
    for text in (f"I am {word}", f"pure: {word}", f"unsafe: {word}", f"idempotent: {word}"):
        assert user_data.by_http(text)["status"] == "done"
    assert user_data.by_http(f"pure: {word} as well", agent="adapted")["status"] == "done"
    for agent in ("tester", "adapted"):
        assert f"{word}.pdf" in user_data.by_http(f"chart: {word}", agent=agent)["reply"]["text"] or agent == "adapted"
    assert len(user_data.by_http(f"asks: {word}")["children"]) == 2
    assert user_data.by_http(f"hands over: {word}", conversation=f"of {word}")["status"] == "done"
    user_data.steered()
    user_data.asked()
    assert user_data.by_http(f"refuse: {word}")["status"] == "failed"
    user_data.by_http(f"reply to {word}", reply_to={"url": f"http://127.0.0.1:9/{word}"})
    user_data.with_files()
    user_data.refused_by_http()
    errors = user_data.by_celery()
    praised = user_data.by_http(f"what is {word}?")["turn_id"]
    feedback = {"score": 1, "comment": f"well said, {word}"}
    user_data._client.post(f"/v1/turns/{praised}/feedback", json=feedback).raise_for_status()
    assert perdure("send", f"from a terminal {word}", "--user", user_data.user, "--wait", "20").returncode == 0
    _import(user_data, perdure, directory)
    _remember(user_data, installation, praised)
    _fail_in_postgresql(user_data, installation)
    return errors


def _import(user_data: UserData, perdure: Perdure, directory: Path) -> None:
    file = directory / "import.jsonl"
    line = {"user_id": user_data.user, "session": "old", "occurred_at": "2026-01-01T00:00:00Z"}
    lines = [
        {**line, "message_id": f"old {role}", "role": role, "content": f"long ago {user_data.word}"}
        for role in ("user", "assistant")
    ]
    file.write_text("\n".join(json.dumps(each) for each in [*lines, {**line, "content": user_data.word}]))
    assert perdure("messages", "import", str(file)).returncode == 1, "the last line is malformed"
    for left in directory.glob("*-*"):
        if left.name.startswith(("in-", "out-", "err-")):
            left.unlink()  # output files of this test's commands
    file.unlink()


def _remember(user_data: UserData, installation: Installation, turn_id: str) -> None:
    """End the session of a turn, and wait until the user has memories."""
    session_id = user_data._client.get(f"/v1/turns/{turn_id}").json()["session_id"]
    user_data._client.post(f"/v1/sessions/{session_id}/end", json={"reason": user_data.word}).raise_for_status()
    parameters = {"user": user_data.user}
    counted = "SELECT 1 FROM memories WHERE user_id = %(user)s"
    wait_until(lambda: installation.query(counted, **parameters), "memories are stored")


def _fail_in_postgresql(user_data: UserData, installation: Installation) -> None:
    """Cause a lock timeout in a statement that contains a text of the user."""
    url = installation.database.url
    with psycopg2.connect(url.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.cursor().execute("LOCK TABLE perdure.inbox IN ACCESS EXCLUSIVE MODE")
        sent = user_data._client.post(
            "/v1/messages", json={"user_id": user_data.user, "text": f"locked out {user_data.word}"}
        )
        assert sent.status_code == 503
    connection.close()


def poison(user_data: UserData, installation: Installation) -> None:
    """Send a message whose turn kills the worker. Restart the worker, and wait until the turn has failed."""
    (worker,) = installation.workers
    text = f"deadly: {user_data.word}"
    message = {"user_id": user_data.user, "text": text, "agent": "tester"}
    accepted = user_data._client.post("/v1/messages", json=message).json()
    worker.container.wait()
    worker.container.start()
    worker.container.ready()
    assert installation.settled(accepted["turn_id"])[0]["error"]["code"] == "BUDGET_EXHAUSTED"


def in_tables(server: PostgresServer, word: str) -> dict[str, int]:
    """The number of rows that contain `word`, for each table with such a row.

    System catalogues are included; `pg_statistic` may be read by the administrator only.
    """
    counted = {}
    with administering(server) as connection:
        tables = connection.exec_driver_sql(
            "SELECT format('%%I.%%I', nspname, relname) AS name FROM pg_class AS c JOIN pg_namespace AS n "
            "ON n.oid = relnamespace WHERE relkind = 'r' AND NOT relisshared"
        )
        for table in tables.scalars().all():
            found = f"SELECT count(*) FROM {table} AS t WHERE t::text LIKE %(like)s"  # noqa: S608 (catalogue's)
            counted[table] = connection.exec_driver_sql(found, {"like": f"%{word}%"}).scalar_one()
    return {name: count for name, count in counted.items() if count}


@contextmanager
def administering(server: PostgresServer) -> Iterator[Connection]:
    """A connection of the administrator."""
    engine = engine_of(server.administrator, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def in_redis(url: str, word: str) -> list[str]:
    """The keys whose name or value contains `word`."""
    client: Any = Redis.from_url(redis.client_url(url), decode_responses=True)
    readers = {
        "string": client.get,
        "hash": client.hgetall,
        "list": lambda key: client.lrange(key, 0, -1),
        "set": client.smembers,
        "zset": lambda key: client.zrange(key, 0, -1),
        "stream": client.xrange,
    }
    found = [key for key in client.scan_iter() if word in f"{key} {readers[client.type(key)](key)}"]
    client.close()
    return found


def in_files(directory: Path, word: str, excluded: tuple[str, ...] = EXCLUDED) -> list[str]:
    """The files under a directory whose names or contents contain `word`."""
    found = []
    for path in directory.rglob("*"):
        name = str(path.relative_to(directory))
        if name.startswith(tuple(f"{each}/" for each in excluded)) or not path.is_file():
            continue
        with suppress(FileNotFoundError):
            if word in name or word.encode() in path.read_bytes():
                found.append(name)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_an_erasure_leaves_no_text_of_the_user(
    installation: Installation, server: PostgresServer, perdure: Perdure, data: Path, tmp_path: Path
) -> None:
    """After an erasure, all texts of the user are gone, even texts that were refused and texts of failed turns."""
    with serving(perdure) as url, httpx2.Client(base_url=url, timeout=30) as client:
        for user_data in (UserData(client, installation, OTHER, KEPT), UserData(client, installation, USER, SECRET)):
            errors = live(user_data, installation, perdure, tmp_path)
            assert not [error for error in errors if user_data.word in error]
        poison(user_data, installation)
        for user, word in ((OTHER, KEPT), (USER, SECRET)):
            user_data = UserData(client, installation, user, word)
            user_data.by_http(f"pure: {word} again")
            user_data.parked(f"coffee: {word} without an answer")
        installation.database.engine.connect().exec_driver_sql("ANALYZE")
        before = in_tables(server, SECRET)
        assert {"perdure.messages", "perdure.cases", "perdure.memories", "pg_catalog.pg_statistic"} <= before.keys()
        assert {"perdure.files", "perdure.tool_effects", "perdure.turns", "perdure.deliveries"} <= before.keys()
        for kind, rows in KINDS.items():
            assert installation.query(f"SELECT FROM {rows} LIKE %(like)s", like=f"%{SECRET}%"), kind
        assert in_files(data / "files", SECRET), "the word is in objects"
        assert in_redis(installation.redis.url, SECRET)
        assert in_files(data, SECRET), "the word is in Redis's file"

        erased = client.delete(f"/v1/users/{USER}").raise_for_status().json()
        assert erased["everywhere"]
        wait_until(lambda: not installation.query("SELECT 1 FROM erasures"), "the second pass is done")
        wait_until(lambda: not installation.query("SELECT 1 FROM stale_statistics"), "the statistics are updated")
        assert in_tables(server, SECRET) == {}
        assert in_redis(installation.redis.url, SECRET) == []
        assert in_files(data, SECRET) == []
    installation.workers[0].container.kill("SIGTERM")
    assert in_files(tmp_path, SECRET, tuple(f"data/{each}" for each in EXCLUDED)) == []
    assert "perdure.messages" in in_tables(server, KEPT)
    assert in_redis(installation.redis.url, KEPT)
    _erased_for_good(server, data)


def _erased_for_good(server: PostgresServer, data: Path) -> None:
    """Assert that `VACUUM FULL` and `CHECKPOINT` remove the texts from the table files (see docs/operating.md)."""
    with administering(server) as connection:
        connection.exec_driver_sql("VACUUM FULL")
        connection.exec_driver_sql("CHECKPOINT")
    assert in_files(data, SECRET, ("postgres/data/pg_wal",)) == []
