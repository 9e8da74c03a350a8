"""`perdure.send`: accepts a message in the application's own transaction.

`send` inserts one row, which commits or rolls back with the application's own rows. The insert takes no lock that other
transactions wait for. After the commit, `send` publishes a wake-up, and a worker routes the message
(`turns.inbox.route_unrouted`); if the wake-up is lost, the sweeper routes the message. Names in SQL are qualified with
the schema, because the caller sets the connection's `search_path`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, MetaData, Table, event
from sqlalchemy import text as sql
from sqlalchemy.orm import Session, SessionTransaction, scoped_session

from perdure.access.tenants import UserKey, parse_tenant
from perdure.application.process import Parts, parts
from perdure.database.engine import as_json
from perdure.database.schema import quoted
from perdure.database.tables import unrouted
from perdure.errors import IncompatibleDatabase
from perdure.ids import new_id
from perdure.settings import OnBusy
from perdure.turns.inbox.accept import check_settings
from perdure.turns.inbox.incoming import Incoming, parse_incoming

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

_INSERT = "INSERT INTO {schema}.unrouted (turn_id, user_id, message) VALUES (%s, %s, %s)"

_STATE = """
    SELECT current_user::text, c.oid IS NOT NULL,
           coalesce(has_schema_privilege(n.oid, 'USAGE') AND has_any_column_privilege(c.oid, 'INSERT'), false)
    FROM (SELECT) AS one
    LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = {schema}
    LEFT JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'unrouted'
"""

_ON_COMMIT = "perdure: users to wake"
"""The key under which `Session.info` holds the users to wake after the commit."""

_checked: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()
"""For each engine, the schema in which `send` found perdure's tables. `send` checks each engine once."""

_on_commit: WeakKeyDictionary[Connection, set[UserKey]] = WeakKeyDictionary()
"""For each connection, the users to wake after its transaction commits."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message in the caller's transaction. `session_id` is `None`: a worker assigns the session after the commit.

    Example:
        >>> with engine.begin() as connection:
        ...     sent = send(connection, user_id="ana", text="Hello.")
        >>> sent.status, sent.session_id
        ('accepted', None)
    """

    turn_id: UUID
    session_id: UUID | None = None
    status: str = "accepted"


class ReplyTarget(TypedDict, total=False):
    """Where the reply goes: a `url`, or a Celery `task` with its `queue`."""

    url: str
    task: str
    queue: str


class Fields(TypedDict, total=False):
    """Fields of a message beside its user and its text, as in `POST /v1/messages`."""

    parts: Sequence[Mapping[str, Any]]
    channel: str
    message_id: str | None
    conversation: str | None
    session_id: UUID | str | None
    agent: str | None
    priority: int
    on_busy: OnBusy | Literal["enqueue", "reject", "interrupt", "merge", "steer"] | None
    reply_to: ReplyTarget | None
    remember: bool
    metadata: Mapping[str, Any] | None


def send(
    connection: Any, *, user_id: str, text: str | None = None, tenant: str | None = None, **fields: Unpack[Fields]
) -> Sent:
    """Insert a message in the transaction of `connection`. The message is accepted when this transaction commits.

    `connection` is a SQLAlchemy `Connection`, `Session` or `scoped_session`, or a Django connection
    (`django.db.connection`), and must be connected to the database of `PERDURE_DATABASE_URL`. `fields` are further
    fields of `POST /v1/messages`, such as `parts` in place of `text`.

    Raises:
        InvalidRequest, TooLarge: the message is refused. Rules that need other rows (rate limits, `on_busy`, a repeated
            `message_id`) are checked after the commit; `perdure.result` and `GET /v1/turns/{id}` then show a refusal.
        IncompatibleDatabase: the database has no tables of perdure, or the connection's role may not insert messages;
            the transaction remains usable.
        SettingsError: a setting is invalid.
        TypeError: `connection` has another type.

    Example:
        >>> with engine.begin() as connection:  # the application's own rows commit with the message
        ...     sent = send(connection, user_id="ana", text="Hello.")
        >>> result(sent, timeout=30).reply
        'Good day.'
    """
    own = parts()
    given: Mapping[str, Any] = fields if text is None else {"text": text, **fields}
    message = parse_incoming({"user_id": user_id, **given}, tenant=parse_tenant(tenant))
    check_settings(own.settings, message)
    turn_id = new_id(own.clock)
    if isinstance(connection, scoped_session):
        connection = connection()
    if isinstance(connection, Session):
        used = connection.connection()
        _insert(own, used, turn_id, message)
        if isinstance(connection.get_bind(), Connection) or _autocommits(used):
            _wake_after_connection(own, used, message.user)  # the session's commit may leave a transaction open
        else:
            _wake_after_session(own, connection, message.user)
    elif isinstance(connection, Connection):
        _insert(own, connection, turn_id, message)
        _wake_after_connection(own, connection, message.user)
    elif hasattr(connection, "vendor") and hasattr(connection, "on_commit"):
        _insert_with_django(own, connection, turn_id, message)
        if connection.in_atomic_block or connection.get_autocommit():
            connection.on_commit(lambda: own.wake(message.user))
        else:  # outside `atomic`, with autocommit off: Django has no hook for the application's own commit
            own.wake_soon(message.user)
    else:
        raise TypeError(
            f"perdure.send takes a SQLAlchemy Connection or Session or a Django connection, not {type(connection)!r}; "
            "for AsyncConnection and AsyncSession there is perdure.send_async."
        )
    return Sent(turn_id)


async def send_async(
    connection: AsyncConnection | AsyncSession | async_scoped_session[AsyncSession],
    *,
    user_id: str,
    text: str | None = None,
    tenant: str | None = None,
    **fields: Unpack[Fields],
) -> Sent:
    """`send` on a SQLAlchemy `AsyncConnection`, `AsyncSession` or `async_scoped_session`.

    Example:
        >>> import asyncio
        >>> async def greet() -> Sent:
        ...     async with async_engine.begin() as connection:
        ...         return await send_async(connection, user_id="ana", text="Hello.")
        >>> asyncio.run(greet()).status
        'accepted'
    """
    from sqlalchemy.ext.asyncio import async_scoped_session  # noqa: PLC0415 (only for applications with asyncio)

    if isinstance(connection, async_scoped_session):
        connection = connection()
    run_sync = getattr(connection, "run_sync", None)
    if run_sync is None:
        raise TypeError(f"perdure.send_async takes an AsyncConnection or AsyncSession, not {type(connection)!r}.")
    sent: Sent = await run_sync(lambda sync: send(sync, user_id=user_id, text=text, tenant=tenant, **fields))
    return sent


def _insert(own: Parts, connection: Connection, turn_id: UUID, message: Incoming) -> None:
    schema = own.settings.database_schema
    if connection.dialect.name != "postgresql":
        raise IncompatibleDatabase(f"perdure.send needs PostgreSQL; this connection is to {connection.dialect.name}.")
    if _checked.get(connection.engine) != schema:
        state = sql(_STATE.format(schema=":schema"))
        _require(schema, *connection.execute(state, {"schema": schema}).one())
        _checked[connection.engine] = schema
    values = {"turn_id": turn_id, "user_id": message.user, "message": _fields(message)}
    connection.execute(_table(schema).insert().inline(), values)


@cache
def _table(schema: str) -> Table:
    return unrouted.to_metadata(MetaData(), schema=schema)


def _insert_with_django(own: Parts, connection: Any, turn_id: UUID, message: Incoming) -> None:
    schema = own.settings.database_schema
    if connection.vendor != "postgresql":
        raise IncompatibleDatabase(f"perdure.send needs PostgreSQL; this connection is to {connection.vendor}.")
    with connection.cursor() as cursor:
        cursor.execute(_STATE.format(schema="%s"), [schema])
        _require(schema, *cursor.fetchone())
        given = [str(turn_id), message.user, as_json(_fields(message))]
        cursor.execute(_INSERT.format(schema=quoted(schema)), given)


def _fields(message: Incoming) -> Mapping[str, Any]:
    return message.model_dump(mode="json", exclude={"user"}, exclude_none=True)  # the text is also that of the parts


def _require(schema: str, role: str, there: bool, allowed: bool) -> None:  # noqa: FBT001 (a row's columns)
    if not there:
        raise IncompatibleDatabase(
            f"The database of this connection has no tables of perdure in the schema {schema!r}: run `perdure migrate` "
            "with PERDURE_DATABASE_URL set to it, or set PERDURE_DATABASE_SCHEMA."
        )
    if not allowed:
        raise IncompatibleDatabase(
            f"The role {role!r} may not insert messages: run `perdure migrate --grant {role}` as the owner of "
            "perdure's tables."
        )


def _wake_after_session(own: Parts, session: Session, user: UserKey) -> None:
    """Wake the user after the session's outermost transaction commits; a rollback discards the wake-up."""
    users = session.info.get(_ON_COMMIT)
    if users is None:
        users = session.info[_ON_COMMIT] = set()
        event.listen(session, "after_commit", _wake_users(own))
        event.listen(session, "after_soft_rollback", _forget_users)
    users.add(user)


def _wake_users(own: Parts) -> Callable[[Session], None]:
    def wake(session: Session) -> None:
        if session.in_nested_transaction():
            return
        users = session.info.get(_ON_COMMIT, set())
        own.wake(*users)
        users.clear()

    return wake


def _forget_users(session: Session, previous: SessionTransaction) -> None:
    if not previous.nested:
        session.info.get(_ON_COMMIT, set()).clear()


def _wake_after_connection(own: Parts, connection: Connection, user: UserKey) -> None:
    if _autocommits(connection):
        own.wake(user)
        return

    users = _on_commit.get(connection)
    if users is None:
        users = _on_commit[connection] = set()
        event.listen(connection, "commit", partial(_wake_soon, own))
        event.listen(connection, "commit_twophase", partial(_wake_soon, own))
        event.listen(connection, "rollback", _forget)
        event.listen(connection, "rollback_twophase", _forget)
    users.add(user)


def _autocommits(connection: Connection) -> bool:
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def _wake_soon(own: Parts, connection: Connection, *_: Any) -> None:
    """Schedule wake-ups with a delay.

    SQLAlchemy has no event after a connection's commit, so it calls this function just before the commit.
    """
    users = sorted(_on_commit[connection])
    _forget(connection)
    own.wake_soon(*users)


def _forget(connection: Connection, *_: Any) -> None:
    _on_commit[connection].clear()
