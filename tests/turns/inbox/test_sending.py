"""`perdure.send` inserts a message in the application's transaction. After the commit, a worker routes the message."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import Any
from uuid import UUID

import pytest
from django.apps import apps
from django.db import connections, transaction
from sqlalchemy import Engine, Row, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.orm.session import JoinTransactionMode

from perdure import Agent, Sent, answer, external_tool, result, send, send_async
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.application import process
from perdure.channels.http.schemas.turns import Turn
from perdure.database.engine import Database, Statement
from perdure.database.grants import grant_sending
from perdure.errors import DeadlineExceeded, IncompatibleDatabase, InvalidRequest, InvalidResponse, NotFound, TooLarge
from perdure.settings import GuardSettings
from perdure.turns import queries
from perdure.turns.cancel import cancel
from perdure.turns.committed import states_of
from perdure.turns.inbox import route_unrouted
from perdure.turns.outbox import Delivered, deliver, list_deliveries
from perdure.turns.reading import find_owner, read_turn
from perdure.turns.sweep import sweep
from perdure.users.export import export_user
from tests.databases import ORDINARY, Databases
from tests.files.contents import png
from tests.turns import django_apps
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says
from tests.turns.test_outbox import Recipient

WAKE = process.Parts.wake
ORDERS = "CREATE TABLE public.orders (id serial PRIMARY KEY, item text NOT NULL)"


@pytest.fixture
def woken(database: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The users for whom the application's process has published a wake-up."""
    found: list[str] = []
    monkeypatch.setenv("PERDURE_DATABASE_URL", database.url.render_as_string(hide_password=False))
    monkeypatch.setattr(process, "_parts", {})
    monkeypatch.setattr("perdure.application.process.Parts.wake", lambda _, *users: found.extend(users))
    monkeypatch.setattr(process, "_LATER_S", (0.0,))
    yield found
    for each in process._parts.values():
        if "database" in vars(each):
            each.database.close()
        if "watch" in vars(each):
            each.watch.close()


@pytest.fixture
def woken_soon(woken: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As `woken`, including the wake-ups that the process publishes shortly after a connection's commit."""
    monkeypatch.setattr(process.Parts, "wake_soon", lambda _, *users: woken.extend(users))
    return woken


@pytest.fixture
def application(database: Database, woken: list[str]) -> Iterator[Engine]:
    """The application's engine, with the default `search_path` and a table `orders`."""
    made = create_engine(database.url)
    with made.begin() as connection:
        connection.execute(text(ORDERS))
    yield made
    made.dispose()


def routed(harness: Harness, sent: Sent) -> dict[str, Any]:
    """Route the message, run its session and return the turn."""
    route_unrouted.route_due(harness.runtime)
    found = read_turn(harness.database, sent.turn_id)
    if found["session_id"] is not None and found["status"] == "accepted":
        harness.run(UUID(found["session_id"]))
    return read_turn(harness.database, sent.turn_id)


def rows(engine: Engine) -> int:
    """The number of rows in the application's table `orders`."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM public.orders")).scalar_one())


def test_a_message_commits_with_the_applications_rows(harness: Harness, application: Engine, woken: list[str]) -> None:
    """Before the commit, the turn is invisible. After the commit, it has no session until the message is routed."""
    with application.connect() as connection:
        connection.execute(text("INSERT INTO public.orders (item) VALUES ('tea')"))
        sent = send(connection, user_id="ana", text="hello")
        assert (sent.session_id, sent.status, woken) == (None, "accepted", [])
        with pytest.raises(NotFound):
            read_turn(harness.database, sent.turn_id)
        connection.commit()
    seen = read_turn(harness.database, sent.turn_id)
    assert (seen["status"], seen["session_id"], seen["seq"]) == ("accepted", None, None)
    Turn.model_validate(seen)
    harness.script(says("Good day."))
    assert routed(harness, sent)["reply"]["text"] == "Good day."
    assert read_turn(harness.database, sent.turn_id)["turn_id"] == str(sent.turn_id)
    assert harness.sql("SELECT count(*) AS n FROM unrouted")[0].n == 0


def test_a_message_has_files(harness: Harness, application: Engine, woken: list[str]) -> None:
    """A worker stores them when it routes the message; a file that cannot be used fails the turn."""
    data = base64.b64encode(png(40, 30)).decode()
    with application.begin() as connection:
        sent = send(
            connection, user_id="ana", parts=[{"type": "text", "text": "Look"}, {"type": "image", "data": data}]
        )
        bomb = base64.b64encode(png(10**6, 1)).decode()
        refused = send(connection, user_id="ana", parts=[{"type": "image", "data": bomb}])
        with pytest.raises(TooLarge):
            send(connection, user_id="ana", parts=[{"type": "image", "data": "A" * 2**26}])
    assert routed(harness, sent)["status"] == "done"
    asked = harness.messages(harness.sql("SELECT session_id FROM turns")[0].session_id)[0]
    assert (asked["content"], asked["parts"][0]["width"]) == ("Look", 40)
    error = routed(harness, refused)["error"]
    assert (error["code"], "1,000,000 by 1 pixels" in error["message"]) == ("INVALID_REQUEST", True)
    assert harness.sql("SELECT count(*) FROM unrouted WHERE message::text LIKE %(data)s", data=f"%{data}%")[0][0] == 0


def test_a_rollback_leaves_nothing(harness: Harness, application: Engine, woken: list[str]) -> None:
    """A rollback discards both the message and its wake-up."""
    with application.connect() as connection:
        send(connection, user_id="ana", text="hello")
        connection.rollback()
        connection.execute(text("INSERT INTO public.orders (item) VALUES ('tea')"))
        connection.commit()
    assert harness.sql("SELECT count(*) AS n FROM unrouted")[0].n == 0
    assert woken == []


def test_a_rolled_back_savepoint_discards_its_messages(harness: Harness, application: Engine, woken: list[str]) -> None:
    """The transaction's other messages are accepted at the outermost commit."""
    with Session(application) as session:
        outer = send(session, user_id="ana", text="first")
        with session.begin_nested():
            inner = send(session, user_id="bob", text="second")
        nested = session.begin_nested()
        gone = send(session, user_id="cleo", text="third")
        nested.rollback()
        assert woken == []
        session.commit()
    assert {"ana", "bob"} <= set(woken)
    assert read_turn(harness.database, outer.turn_id)["status"] == "accepted"
    assert read_turn(harness.database, inner.turn_id)["status"] == "accepted"
    with pytest.raises(NotFound):
        read_turn(harness.database, gone.turn_id)


def test_a_session_wakes_after_its_commit_and_not_after_a_rollback(application: Engine, woken: list[str]) -> None:
    """A rollback publishes no wake-up. The SQLAlchemy session can be used again after a rollback or a commit."""
    make = scoped_session(sessionmaker(application))
    send(make, user_id="ana", text="hello")
    make.rollback()
    make.commit()
    assert woken == []
    send(make, user_id="bob", text="hello")
    make.commit()
    send(make, user_id="cleo", text="hello")
    make.commit()
    make.remove()
    assert woken == ["bob", "cleo"]


def test_a_connection_in_autocommit(harness: Harness, application: Engine, woken: list[str]) -> None:
    """In autocommit, each statement is a transaction, so the message is accepted at once."""
    with application.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        sent = send(connection, user_id="ana", text="hello")
        assert woken == ["ana"]
    assert read_turn(harness.database, sent.turn_id)["status"] == "accepted"


def test_a_session_in_autocommit(harness: Harness, database: Database, woken: list[str]) -> None:
    """In autocommit, the message is accepted at once, whether or not the session commits."""
    with Session(create_engine(database.url, isolation_level="AUTOCOMMIT")) as session:
        sent = send(session, user_id="ana", text="hello")
        assert woken == ["ana"]
    assert read_turn(harness.database, sent.turn_id)["status"] == "accepted"


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint", "control_fully"])
def test_a_session_within_the_transaction_of_a_connection(
    application: Engine, woken_soon: list[str], mode: JoinTransactionMode
) -> None:
    """The wake-up follows the commit of the connection's transaction, which the session's own commit may leave open."""
    with application.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            send(session, user_id="ana", text="hello")
            session.commit()
        if mode != "control_fully":
            assert woken_soon == []
            connection.commit()
        assert woken_soon == ["ana"]
        connection.begin()
        with Session(connection, join_transaction_mode=mode) as session:
            send(session, user_id="bob", text="hello")
        connection.rollback()
        with Session(connection) as session:  # begins and ends the transaction itself
            send(session, user_id="cleo", text="hello")
            session.commit()
    assert woken_soon == ["ana", "cleo"]


def test_a_transaction_in_two_phases(application: Engine, woken_soon: list[str]) -> None:
    """A transaction in two phases wakes after its commit, and not after its rollback."""
    with application.connect() as connection:
        send(connection, user_id="ana", text="hello")
        connection.dispatch.rollback_twophase(connection, "x", True)
        send(connection, user_id="bob", text="hello")
        connection.dispatch.commit_twophase(connection, "x", True)
        assert woken_soon == ["bob"]
        connection.rollback()


def test_an_async_session(harness: Harness, database: Database, application: Engine, woken: list[str]) -> None:
    """`send_async` works with asyncpg, which checks types strictly. A rollback discards the message."""
    engine = create_async_engine(database.url.set(drivername="postgresql+asyncpg"))

    async def use() -> Sent:
        async with AsyncSession(engine) as session:
            await send_async(session, user_id="bob", text="hello", metadata={"page": 1})
            await session.rollback()
            sent = await send_async(session, user_id="ana", text="hello", metadata={"page": 1}, tenant="acme")
            await session.commit()
        async with engine.begin() as connection:
            await send_async(connection, user_id="cleo", text="hello")
        scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
        await send_async(scoped, user_id="dora", text="hello")
        await scoped.commit()
        await scoped.remove()
        await engine.dispose()
        return sent

    sent = asyncio.run(use())
    assert woken[0] == "acme\x1fana"
    users = {row.user_id for row in harness.sql("SELECT user_id FROM unrouted")}
    assert users == {"acme\x1fana", "cleo", "dora"}
    assert routed(harness, sent)["status"] == "done"


def test_a_django_connection(
    harness: Harness,
    database: Database,
    application: Engine,
    woken: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within `atomic`, Django's `on_commit` publishes the wake-up."""
    server = str(database.url.query["host"])
    one = {"ENGINE": "django.db.backends.postgresql", "NAME": database.url.database, "USER": "perdure", "HOST": server}
    django_apps.configure()
    monkeypatch.setattr(apps, "ready", True)
    connections.databases["shop"] = connections.configure_settings({"default": one})["default"]
    connection = connections["shop"]
    with transaction.atomic(using="shop"):
        sent = send(connection, user_id="ana", text="hello", metadata={"order": 7})
        with transaction.atomic(using="shop"):
            send(connection, user_id="bob", text="hello")
            transaction.set_rollback(True, using="shop")
        assert woken == []
    assert woken == ["ana"]
    assert [row.user_id for row in harness.sql("SELECT user_id FROM unrouted")] == ["ana"]
    assert routed(harness, sent)["status"] == "done"
    connection.close()


@pytest.mark.long
def test_a_database_without_perdures_tables(
    databases: Databases, harness: Harness, monkeypatch: pytest.MonkeyPatch, woken: list[str]
) -> None:
    """The error names the command that creates the tables. The application's transaction stays usable."""
    with databases.empty() as url:
        engine = create_engine(url)
        with engine.connect() as connection:
            connection.execute(text(ORDERS))
            with pytest.raises(
                IncompatibleDatabase, match="no tables of perdure in the schema 'perdure': run `perdure"
            ):
                send(connection, user_id="ana", text="hello")
            connection.execute(text("INSERT INTO public.orders (item) VALUES ('tea')"))
            connection.commit()
        assert rows(engine) == 1
        engine.dispose()


def test_a_role_needs_the_right_to_insert_and_no_other(
    databases: Databases, harness: Harness, database: Database, application: Engine, woken: list[str]
) -> None:
    """After `perdure migrate --grant`, the role can send messages but not read them."""
    role = 'shop "clerk"'
    databases.administer('DROP ROLE IF EXISTS "shop ""clerk"""')
    databases.administer(f'CREATE ROLE "shop ""clerk""" ROLE {ORDINARY}')
    own = database.url.query | {"options": '-c role=shop\\ "clerk"'}
    clerk = create_engine(database.url.set(query=own))
    try:
        with clerk.connect() as connection:
            with pytest.raises(
                IncompatibleDatabase, match="may not insert messages: run `perdure migrate --grant shop"
            ):
                send(connection, user_id="ana", text="hello")
            connection.rollback()
        with pytest.raises(InvalidRequest, match='role "nobody of this name" does not exist'):
            grant_sending(database.url, "perdure", "nobody of this name")
        for _ in range(2):
            grant_sending(database.url, "perdure", role)
        with clerk.begin() as connection:
            send(connection, user_id="ana", text="hello")
        with clerk.connect() as connection, pytest.raises(Exception, match="permission denied"):
            connection.execute(text("SELECT * FROM perdure.unrouted"))
        assert harness.sql("SELECT count(*) AS n FROM unrouted")[0].n == 1
    finally:
        clerk.dispose()
        harness.sql('DROP OWNED BY "shop ""clerk"""')
        databases.administer('DROP ROLE "shop ""clerk"""')


def test_messages_that_are_refused_at_once(application: Engine, woken: list[str]) -> None:
    """Before the insert, `send` makes every check that needs no query."""
    with application.connect() as connection:
        with pytest.raises(InvalidRequest, match="text"):
            send(connection, user_id="ana", text="")
        with pytest.raises(TooLarge):
            send(connection, user_id="ana", text="x" * 10_001)
        with pytest.raises(InvalidRequest, match="PERDURE_REPLY_TASKS"):
            send(connection, user_id="ana", text="hello", reply_to={"task": "shop.reply"})
        with pytest.raises(InvalidRequest, match="colour"):
            send(connection, user_id="ana", text="hello", colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="not <class 'str'>"):
        send("postgresql://", user_id="ana", text="hello")
    with pytest.raises(TypeError, match="send_async"):
        asyncio.run(send_async(object(), user_id="ana", text="hello"))  # type: ignore[arg-type]


def test_a_repeated_message_is_one_turn(harness: Harness, application: Engine) -> None:
    """Repeated messages with the same id and text become one turn. The same id with another text is refused."""
    with application.begin() as connection:
        first, again = (send(connection, user_id="ana", text="hello", message_id="m") for _ in range(2))
        other = send(connection, user_id="ana", text="something else", message_id="m")
    done = routed(harness, first)
    assert done["status"] == "done"
    assert read_turn(harness.database, again.turn_id) == done
    assert harness.send("hello", message_id="m").turn_id == first.turn_id
    refused = read_turn(harness.database, other.turn_id)
    assert (refused["status"], refused["error"]["code"]) == ("failed", "CONFLICT")
    assert "was used for another text" in refused["reply"]["text"]
    assert route_unrouted.resolve(harness.runtime, again.turn_id) == first.turn_id


def test_a_rate_limit_delays_and_keeps_the_order(harness: Harness, application: Engine) -> None:
    """The commit has accepted the messages, so a rate limit delays them and refuses none."""
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(per_minute=2)})
    with application.begin() as connection:
        sent = [send(connection, user_id="ana", text=f"number {number}") for number in range(5)]
    for expected in (2, 4, 5):
        for _ in range(2):
            route_unrouted.route_due(harness.runtime)
            assert harness.sql("SELECT count(*) AS n FROM turns")[0].n == expected
        harness.move(61)
    ids = [str(row.turn_id) for row in harness.sql("SELECT turn_id FROM turns ORDER BY seq")]
    assert ids == [str(each.turn_id) for each in sent]


def test_refusals_after_the_commit_are_failed_turns(harness: Harness, application: Engine) -> None:
    """A message to a busy session, an unknown session or an unknown agent becomes a failed turn with the reason."""
    with application.begin() as connection:
        first = send(connection, user_id="ana", text="first")
        busy = send(connection, user_id="ana", text="second", on_busy="reject")
        lost = send(connection, user_id="ana", text="third", session_id="00000000-0000-7000-8000-000000000000")
        unknown = send(connection, user_id="ana", text="fourth", agent="nobody")
        last = send(connection, user_id="ana", text="last")
    assert routed(harness, first)["status"] == "done"
    harness.move(harness.settings.turn.unknown_agent_s + 1)
    harness.run(UUID(read_turn(harness.database, unknown.turn_id)["session_id"]))
    codes = [read_turn(harness.database, each.turn_id)["error"]["code"] for each in (busy, lost, unknown)]
    assert codes == ["CONFLICT", "NOT_FOUND", "INVALID_REQUEST"]
    assert read_turn(harness.database, last.turn_id)["status"] == "done"


def test_a_refusal_reaches_the_receiver(harness: Harness, application: Engine) -> None:
    """If a message is refused after its commit, the refusal is delivered to the message's `reply_to`."""
    lost = "00000000-0000-7000-8000-000000000000"
    with application.begin() as connection:
        sent = send(
            connection, user_id="ana", text="hello", reply_to={"url": "https://a.example/hook"}, session_id=lost
        )
        send(connection, user_id="ana", text="hello", session_id=lost)
    route_unrouted.route_due(harness.runtime)
    [delivery_id] = harness.waker.deliveries
    [listed] = list_deliveries(harness.database)
    assert (listed["user_id"], listed["turn_id"], listed["status"]) == ("ana", str(sent.turn_id), "pending")
    recipient = Recipient()
    assert deliver(harness.database, {"url": recipient}, delivery_id) == Delivered()
    [(target, body)] = recipient.arrived
    assert target == {"url": "https://a.example/hook"}
    assert (body["status"], body["session_id"], body["error"]["code"]) == ("failed", None, "NOT_FOUND")
    exported = export_user(harness.database, harness.clock, None, UserKey("ana"))
    assert [each["delivery_id"] for each in exported["tables"]["deliveries"]] == [str(delivery_id)]
    harness.runtime.eraser.erase(UserKey("ana"))
    assert list_deliveries(harness.database) == []


def test_many_workers_route_in_order_and_once(harness: Harness, application: Engine) -> None:
    """Eight concurrent workers route each user's messages once and in order."""
    with application.begin() as connection:
        sent = [send(connection, user_id=f"user {n % 3}", text=f"number {n}") for n in range(60)]
    workers = [Thread(target=route_unrouted.route_due, args=(harness.runtime,)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for user in range(3):
        found = harness.sql("SELECT turn_id FROM turns WHERE user_id = %(user)s ORDER BY seq", user=f"user {user}")
        assert [row.turn_id for row in found] == [each.turn_id for each in sent[user::3]]


def test_an_erased_users_messages_are_not_routed(harness: Harness, application: Engine) -> None:
    """If a user is erased while a worker routes the user's messages, no row of the user reappears."""
    with application.begin() as connection:
        for number in range(3):
            send(connection, user_id="ana", text=f"number {number}")
    erased: list[object] = []

    def erase(moment: str, name: str) -> None:
        if (moment, name) == ("after", "turns.accept") and not erased:
            erased.append(harness.runtime.eraser.erase(UserKey("ana")))

    with harness.hooked(erase):
        route_unrouted.route_due(harness.runtime)
    assert erased
    assert harness.sql("SELECT FROM users") == harness.sql("SELECT FROM turns") == []


def test_a_turn_is_found_while_it_is_routed(harness: Harness, application: Engine) -> None:
    """A reader finds the turn even if a worker routes the message between the reader's two queries."""
    with application.begin() as connection:
        sent = [send(connection, user_id=user, text="hello") for user in ("ana", "ben")]
    turns = iter(sent)

    class Reader:
        def run(self, statement: Statement, parameters: Mapping[str, Any]) -> Sequence[Row[Any]]:
            found = harness.database.run(statement, parameters)
            if statement in {queries.READ, queries.OWNER}:
                route_unrouted.route_user(harness.runtime, UserKey("ana" if statement is queries.READ else "ben"))
            return found

    assert read_turn(Reader(), next(turns).turn_id)["status"] == "accepted"
    assert find_owner(Reader(), next(turns).turn_id) == ("ben", True)


def test_the_longest_user_id_of_a_tenant(harness: Harness, application: Engine) -> None:
    """A user id of the maximum length is accepted with a tenant too, although the stored key contains both."""
    with application.begin() as connection:
        sent = send(connection, user_id="u" * 200, text="hello", tenant="acme")
    assert routed(harness, sent)["status"] == "done"


def test_a_message_that_a_limit_delays_can_be_cancelled(harness: Harness, application: Engine) -> None:
    """A delayed message that is cancelled is shown as a cancelled turn and is never routed."""
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(per_minute=1)})
    with application.begin() as connection:
        first, second = (send(connection, user_id="ana", text=f"number {number}") for number in range(2))
    route_unrouted.route_due(harness.runtime)
    before = states_of(harness.database, [second.turn_id])
    cancel(harness.runtime, second.turn_id)
    cancel(harness.runtime, second.turn_id)
    shown = read_turn(harness.database, second.turn_id)
    assert (shown["status"], shown["error"]["code"]) == ("cancelled", "TURN_CANCELLED")
    assert result(second, timeout=5).body == shown
    assert states_of(harness.database, [second.turn_id]) != before
    harness.move(61)
    route_unrouted.route_due(harness.runtime)
    assert [row.turn_id for row in harness.sql("SELECT turn_id FROM turns")] == [first.turn_id]
    with pytest.raises(NotFound):
        cancel(harness.runtime, UUID("00000000-0000-7000-8000-000000000000"))


def test_waiting_for_a_message_that_joins_another_turn(harness: Harness, application: Engine) -> None:
    """`result` waits until the turn into which the message was merged is settled, and returns that turn."""
    with application.begin() as connection:
        first = send(connection, user_id="ana", text="one")
        second = send(connection, user_id="ana", text="two", on_busy="merge")
    route_unrouted.route_due(harness.runtime)
    with pytest.raises(DeadlineExceeded):
        result(second, timeout=0.3)
    assert routed(harness, first)["status"] == "done"
    assert result(second, timeout=5).turn_id == first.turn_id


@pytest.mark.exhaustive
@pytest.mark.parametrize("table", ["sessions", "unrouted"])
def test_a_locked_row_delays_no_other_user(harness: Harness, application: Engine, table: str) -> None:
    """If a message's session or row is locked, for example by an erasure, the sweep continues with other messages."""
    locked = harness.send("first", user_id="ana")
    harness.run(locked.session_id)
    due = harness.send("hello", user_id="bob")
    harness.waker.sessions.clear()
    harness.move(60)
    with application.begin() as connection:
        sent = send(connection, user_id="ana", text="second")
        other_sent = send(connection, user_id="cleo", text="hello")
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(per_minute=100)})
    lock = text(f"SELECT FROM perdure.{table} WHERE user_id = 'ana' FOR UPDATE")
    with application.connect() as other:
        other.execute(lock)
        assert sweep(harness.runtime) is not None
    assert harness.waker.sessions[0] == due.session_id
    assert read_turn(harness.database, sent.turn_id)["session_id"] is None
    assert read_turn(harness.database, other_sent.turn_id)["session_id"] is not None
    harness.move(11)
    assert sweep(harness.runtime) is not None
    assert harness.sql("SELECT FROM turns WHERE turn_id = %(id)s", id=sent.turn_id)


def test_a_commit_succeeds_without_its_wake_up(
    harness: Harness, application: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the wake-up cannot be published, the sweeper routes the committed message."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(process.Parts, "wake", WAKE)
    monkeypatch.setattr(process.Parts, "waker", property(fail))
    with Session(application) as session, session.begin():
        sent = send(session, user_id="ana", text="hello")
    monkeypatch.setattr(Thread, "start", fail)
    with application.begin() as connection:
        other = send(connection, user_id="ana", text="hello again")
    monkeypatch.undo()
    for each in (sent, other):
        assert routed(harness, each)["status"] == "done"


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_while_routing(harness: Harness, application: Engine, moment: Any, nth: int) -> None:
    """After a crash at any commit, the next worker continues. Each message becomes one turn, in order."""
    with application.begin() as connection:
        sent = [send(connection, user_id="ana", text=f"number {number}") for number in range(4)]
    with harness.crashing(moment, "turns.accept", nth):
        route_unrouted.route_due(harness.runtime)
    route_unrouted.route_due(harness.runtime)
    found = harness.sql("SELECT turn_id FROM turns ORDER BY seq")
    assert [row.turn_id for row in found] == [each.turn_id for each in sent]
    assert harness.sql("SELECT count(*) AS n FROM unrouted")[0].n == 0


def test_bringing_the_result_of_a_call(harness: Harness, application: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`answer` records the result of an external call in a process without agents, and wakes the turn."""
    monkeypatch.setattr(process.Parts, "waker", harness.waker)
    harness.equip(external_tool("locate", "Where the user is."))
    harness.script(calls(("locate", {})), says("You are in Paris."))
    with application.begin() as connection:
        sent = send(connection, user_id="ana", text="Where am I?")
    routed(harness, sent)
    [pending] = result(sent, timeout=20)["pending_calls"]
    harness.waker.sessions.clear()
    session_id = answer(sent, pending["call_id"], {"city": "Paris"}).session_id
    assert session_id is not None
    assert harness.waker.sessions == [session_id]
    answer(str(sent.turn_id), pending["call_id"], error="repeated")
    harness.run(session_id)
    assert result(sent, timeout=20).reply == "You are in Paris."
    assert ("tool", '{"city": "Paris"}') in harness.lines(session_id)
    with pytest.raises(InvalidRequest):
        answer(sent, pending["call_id"], 1, error="both")
    with pytest.raises(NotFound):
        answer(sent, "call_9", 1)


def test_waiting_for_the_result(harness: Harness, application: Engine) -> None:
    """`result` returns a settled or refused turn, and raises `DeadlineExceeded` after its timeout."""
    with application.begin() as connection:
        sent = send(connection, user_id="ana", text="hello")
        refused = send(connection, user_id="ana", text="hello", on_busy="reject")
    with pytest.raises(DeadlineExceeded, match=r"is accepted after 0.05 s, and continues"):
        result(sent, timeout=0.05)
    harness.script(says("Good day."))
    routed(harness, sent)
    assert result(str(sent.turn_id), timeout=20).reply == "Good day."
    assert result(refused, timeout=20).body["error"]["code"] == "CONFLICT"
    with pytest.raises(NotFound):
        result("00000000-0000-7000-8000-000000000000", timeout=1)
    with pytest.raises(InvalidRequest):
        result("seven", timeout=1)


def test_a_result_has_the_output_as_a_value_of_its_type(harness: Harness, application: Engine) -> None:
    """Without the type, the data is JSON values; with another type, the error says so."""
    harness.agents = Agents([Agent("assistant", "You help.", output=list[int])])
    harness.script(says("[1, 2]"))
    with application.begin() as connection:
        sent = send(connection, user_id="ana", text="hello")
    routed(harness, sent)
    found = result(sent, output=list[int], timeout=5)
    assert (found.status, found.reply, found.data, found.steps) == ("done", "[1, 2]", [1, 2], 1)
    assert result(sent).data == [1, 2]
    with pytest.raises(InvalidResponse, match="does not fit the output"):
        result(sent, output=str)


def test_a_message_that_was_sent_while_the_clock_was_ahead(harness: Harness, application: Engine) -> None:
    """Once the clock is set back, it is routed at once, and so are the user's later messages, in their order."""
    with application.begin() as connection:
        sent = [send(connection, user_id="ana", text=each) for each in ("one", "two")]
    later = "UPDATE unrouted SET due_at = due_at + interval '1 day' WHERE turn_id = %(id)s"
    harness.sql(later, id=sent[0].turn_id)
    route_unrouted.route_due(harness.runtime)
    assert [row.turn_id for row in harness.sql("SELECT turn_id FROM turns ORDER BY seq")] == [
        each.turn_id for each in sent
    ]
