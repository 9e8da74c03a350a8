"""Logs, task events and database errors contain no text of a user, because logs outlive the erasure of a user."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu.message import Message
from kombu.serialization import dumps
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from perdure.database.engine import Database, Statement
from perdure.errors import GuardRejected, ProviderError, ToolError, Unavailable, loggable
from perdure.tasks.arguments import described
from perdure.tasks.request import Request
from perdure.workers import logs
from perdure.workers.celery_application import load_tasks

SECRET = "zyxomma-of-logs"


@pytest.fixture
def formatter() -> Iterator[logging.Formatter]:
    """The log formatter of a perdure process."""
    root, before = logging.getLogger(), threading.excepthook
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    logs.configure()
    made = root.handlers[0].formatter
    assert made is not None
    yield made
    root.handlers, threading.excepthook = handlers, before
    root.setLevel(level)


def _formatted(formatter: logging.Formatter, error: BaseException) -> str:
    record = logging.LogRecord("test", logging.ERROR, __file__, 1, "it failed", None, (type(error), error, None))
    record.task = "-"
    return formatter.format(record)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError(SECRET), "ValueError"),
        (ToolError(SECRET), "TOOL_ERROR"),
        (GuardRejected(SECRET), "GUARD_REJECTED"),
        (ResponseError(f"unknown command, with args beginning with: {SECRET}"), "ResponseError"),
        (FileNotFoundError(2, "No such file", f"/tmp/{SECRET}"), "FileNotFoundError: No such file"),  # noqa: S108
        (Unavailable("The database is busy."), "UNAVAILABLE: The database is busy."),
        (ProviderError("The server failed."), "PROVIDER_ERROR: The server failed."),
        (RedisConnectionError("Error 111 connecting"), "ConnectionError: Error 111 connecting"),
    ],
)
def test_a_log_shows_a_message_only_if_it_is_a_servers(error: Exception, shown: str) -> None:
    """A log shows an error's text only if it cannot quote a user. Otherwise the log shows only the type or code."""
    assert loggable(error) == shown


def test_a_traceback_has_frames_and_types_and_no_texts(formatter: logging.Formatter) -> None:
    """A traceback shows frames and error types, also of causes, contexts and group members, but no text of a user."""

    def fail() -> None:
        try:
            dict[str, str]()[SECRET]
        except KeyError as error:
            raise ToolError(SECRET) from error

    def handle() -> None:
        try:
            fail()
        except ToolError:
            raise ExceptionGroup(SECRET, [ValueError(SECRET), Unavailable("It is unavailable.")])  # noqa: B904 (a context)

    with pytest.raises(ExceptionGroup) as caught:
        handle()
    written = _formatted(formatter, caught.value)
    assert SECRET not in written
    order = [written.index(each) for each in ("KeyError", "TOOL_ERROR", "ExceptionGroup")]
    assert order == sorted(order)
    assert "ValueError" in written
    assert "UNAVAILABLE: It is unavailable." in written
    assert "in fail" in written


def test_what_ends_a_thread_is_logged_without_its_message(
    capsys: pytest.CaptureFixture[str], formatter: logging.Formatter
) -> None:
    """An exception that ends a thread is logged without its message, and Python prints nothing to stderr."""
    written = io.StringIO()
    (handler,) = [each for each in logging.getLogger().handlers if each.formatter is formatter]
    assert isinstance(handler, logging.StreamHandler)
    handler.stream = written  # the handler's own stream is closed

    def fail() -> None:
        raise ValueError(SECRET)

    thread = threading.Thread(target=fail, name="doomed")
    thread.start()
    thread.join()
    assert "the thread doomed ended" in written.getvalue()
    assert "ValueError" in written.getvalue()
    assert SECRET not in written.getvalue()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("sql", "given", "shown"),
    [
        ("SELECT %(given)s::int AS n", SECRET, "invalid input syntax for type integer"),
        ("SELECT %(given)s::jsonb AS n", f'{{"{SECRET}": \\u0000}}', "invalid input syntax for type json"),
        ("INSERT INTO users (user_id, created_at) VALUES (%(given)s, NULL)", SECRET, "null value in column"),
        ("SELECT 1 / length(%(given)s) / 0 AS n", SECRET, "division by zero"),
        ("SELECT %(given)s::tsquery AS n", f"{SECRET} & &", "syntax error in tsquery (42601)"),
        ("SELECT %(given)s::regclass AS n", SECRET, "relation (42P01)"),
        ("SELECT %(given)s::regrole AS n", SECRET, "role (42704)"),
        ("SELECT now() AT TIME ZONE %(given)s AS n", SECRET, "time zone (22023)"),
        ("SELECT set_config('work_mem', %(given)s, false) AS n", SECRET, "invalid value for parameter (22023)"),
    ],
)
def test_an_error_of_the_database_quotes_no_value(
    database: Database, formatter: logging.Formatter, sql: str, given: str, shown: str
) -> None:
    """Database errors omit the statement's parameters, `DETAIL` and `CONTEXT` lines, and values in the first line."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (SQLAlchemy has one for each kind)
        database.run(Statement(f"test.{shown}", sql), {"given": given})
    written = _formatted(formatter, caught.value)
    assert shown in str(caught.value)
    assert shown in written
    for text in (written, str(caught.value), repr(caught.value), repr(caught.value.__cause__)):
        assert SECRET not in text


def test_a_duplicate_key_is_named_without_its_value(database: Database) -> None:
    """The error of a unique violation names the constraint, but not the duplicate value."""
    add = Statement("test.add", "INSERT INTO users (user_id, created_at) VALUES (%(given)s, now())")
    database.run(add, {"given": SECRET})
    with pytest.raises(Exception, match="users_pkey") as caught:
        database.run(add, {"given": SECRET})
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"


SESSION = "0198c0de-0000-7000-8000-000000000000"


@pytest.mark.parametrize(
    ("positional", "named", "args", "kwargs"),
    [
        ((), {}, "()", "{}"),
        ((), None, "()", "{}"),
        ([SECRET], {"text": SECRET}, "(hidden)", "{(hidden)}"),
        ((), {"session_id": SESSION}, "()", f"{{'session_id': '{SESSION}'}}"),
        ((), {"session_id": SESSION, "text": SECRET}, "()", f"{{'session_id': '{SESSION}', (hidden)}}"),
        ((), {"session_id": SECRET, "turn_id": 5}, "()", "{(hidden)}"),
        ((), SECRET, "()", "(hidden)"),
    ],
)
def test_arguments_are_shown_as_ids(positional: Any, named: Any, args: str, kwargs: str) -> None:
    """Only the ids among a task's arguments are shown, so that an operator can still find the session."""
    assert described(positional, named) == {"argsrepr": args, "kwargsrepr": kwargs}


def test_a_workers_request_hides_what_any_publisher_sent() -> None:
    """A worker hides arguments that the publisher did not hide, because logs, events and `inspect` would show them."""
    app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    load_tasks(app)
    task = app.tasks["turns.submit"]
    kwargs = {"text": SECRET, "session_id": SESSION}
    content_type, encoding, body = dumps(([SECRET], kwargs, {}), "json")
    headers = {"task": "turns.submit", "id": "1", "shadow": SECRET, "argsrepr": SECRET, "kwargsrepr": SECRET}
    message = Message(body, content_type=content_type, content_encoding=encoding, headers=headers)
    made = Request(message, app=app, task=task, body=body)
    shown = [made.info(), made.info(safe=True), repr(made), made.argsrepr, made.kwargsrepr, made.name]
    assert SECRET not in str(shown)
    assert SESSION in made.kwargsrepr
    assert (made.args, made.kwargs) == ([SECRET], kwargs)
    assert task.Request == "perdure.tasks.request:Request"
