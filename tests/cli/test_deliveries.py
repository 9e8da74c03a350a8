"""`perdure deliveries` lists dead letters and makes a worker send them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import text

from perdure.access.tenants import UserKey
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.outbox import Undeliverable, deliver
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure
from tests.processes.receiver import Receiver
from tests.turns.harness import until

REPLY_URLS = "http://127.0.0.1:*"


class Refusing:
    """A carrier whose receiver permanently refuses each delivery."""

    def carry(self, target: dict[str, Any], body: bytes, message_id: str) -> None:
        raise Undeliverable("410 Gone")


@pytest.fixture
def environment(environment: Environment) -> Environment:
    """The environment of an installation that may send replies to loopback addresses."""
    return {**environment, "PERDURE_REPLY_URLS": REPLY_URLS}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An HTTP service on loopback that receives replies."""
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def letters(runtime: Runtime, receiver: Receiver) -> list[str]:
    """The ids of two deliveries: a dead letter, then a pending one."""
    settings = Settings(_env_file=None, reply_urls=REPLY_URLS)  # type: ignore[arg-type]
    runtime = replace(runtime, settings=settings)
    runner = Runner(runtime, owner="test")
    for user in ("ann", "bob"):
        reply_to: Any = {"url": receiver.url}
        runner.run(accept(runtime, Incoming(user=UserKey(user), text="hello", reply_to=reply_to)).session_id)
    runner.close()
    with runtime.database.engine.connect() as connection:
        ids = connection.execute(text("SELECT delivery_id FROM deliveries ORDER BY delivery_id")).scalars().all()
    deliver(runtime.database, {"url": Refusing()}, ids[0])
    return [str(each) for each in ids]


def test_dead_letters_are_listed(perdure: Perdure, letters: list[str]) -> None:
    """`deliveries list` shows the newest delivery first, with its last error. `--status` narrows the list."""
    dead, pending = letters
    assert [each["delivery_id"] for each in json.loads(perdure("deliveries", "list", "--json").stdout)] == [
        pending,
        dead,
    ]
    (found,) = json.loads(perdure("deliveries", "list", "--status", "failed", "--json").stdout)
    assert (found["delivery_id"], found["user_id"], found["last_error"]) == (dead, "ann", "410 Gone")
    assert found["due_at"] is None
    assert dead in perdure("deliveries", "list", "--status", "failed").stdout
    assert perdure("deliveries", "list", "--status", "lost").returncode == 2


@pytest.mark.long
@pytest.mark.usefixtures("working")
def test_a_dead_letter_is_sent_again(perdure: Perdure, receiver: Receiver, letters: list[str]) -> None:
    """After `deliveries resend`, a worker delivers the dead letter under the same id."""
    dead, _ = letters
    assert perdure("deliveries", "resend", dead).returncode == 0
    until(lambda: any(each.body["delivery_id"] == dead for each in list(receiver.came)), "the delivery")
    until(lambda: _statuses(perdure)[dead] == "delivered", "the delivery is recorded")


def _statuses(perdure: Perdure) -> dict[str, str]:
    listed = json.loads(perdure("deliveries", "list", "--json").stdout)
    return {each["delivery_id"]: each["status"] for each in listed}


def test_an_unknown_delivery_is_reported(perdure: Perdure) -> None:
    """An unknown delivery gives status 1 and a message. A malformed id gives status 2."""
    unknown = perdure("deliveries", "resend", str(uuid4()))
    assert (unknown.returncode, "There is no such delivery." in unknown.stderr) == (1, True)
    assert perdure("deliveries", "resend", "x").returncode == 2


def test_failed_deliveries_are_sent_again_together(
    perdure: Perdure, letters: list[str], receiver: Receiver, runtime: Runtime
) -> None:
    """`--failed` restarts those whose receiver matches; a dry run only counts them."""
    dead, pending = letters
    deliver(runtime.database, {"url": Refusing()}, UUID(pending))
    for glob, count in (("https://other.example/*", 0), (f"{receiver.url[:-1]}*", 2)):
        ran = perdure("deliveries", "resend", "--failed", "--to", glob, "--dry-run", "--json")
        assert json.loads(ran.stdout) == {"deliveries": count, "due": False}
    assert len(json.loads(perdure("deliveries", "list", "--status", "failed", "--json").stdout)) == 2
    assert perdure("deliveries", "resend", "--failed").stdout == "2 failed deliveries are due\n"
    (first, second) = json.loads(perdure("deliveries", "list", "--status", "pending", "--json").stdout)
    assert {first["delivery_id"], second["delivery_id"]} == {dead, pending}
    assert first["attempts"] == second["attempts"] == 0


@pytest.mark.parametrize("given", [(), ("--to", "*"), (str(UUID(int=1)), "--failed"), (str(UUID(int=1)), "--dry-run")])
def test_what_to_resend_must_be_clear(perdure: Perdure, given: tuple[str, ...]) -> None:
    """An id, or `--failed`; the options of `--failed` do not go with an id."""
    assert perdure("deliveries", "resend", *given).returncode == 2
