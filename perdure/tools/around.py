"""What surrounds each call of an application's own functions: tools, probes, hooks, approvers, `authenticate`.

Django opens a connection to its database for each thread, and closes it around each request. A tool runs outside of
requests, in a thread of its own. So where Django is set up, perdure closes Django's connections around each call, in
the thread that may have opened them. For other frameworks, `perdure.install(app, around_call=…)` names a function that
returns a context manager, which perdure enters around each call.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any

from perdure.errors import SettingsError

log = logging.getLogger(__name__)

AroundCall = Callable[[], AbstractContextManager[object]]

running: contextvars.ContextVar[str | None] = contextvars.ContextVar("perdure_running", default=None)
"""The function of an agent that runs in this context, such as `the tool pay`; `None` outside of a turn.

Tasks and threads with a copy of the context, such as those of `asyncio.to_thread`, have the same value.
"""

_around_call: AroundCall = nullcontext


def set_around_call(given: AroundCall) -> None:
    """Enter the context manager that `given` returns around each call in this process.

    Raises:
        SettingsError: `given` is not a function.
    """
    global _around_call  # noqa: PLW0603 (one application in each process, as `perdure.install` requires)
    unchecked: Any = given
    if not callable(unchecked) or (hasattr(unchecked, "__enter__") and not isinstance(unchecked, type)):
        raise SettingsError(f"around_call={given!r}; accepted: a function that returns a context manager")
    _around_call = given


@contextmanager
def surrounded(name: str | None = None, *, thread_ends: bool = False) -> Iterator[None]:
    """Surround a call in this thread. `name` is what `running` contains during the call; `None` leaves it as it is.

    If `thread_ends`, the thread ends after the call, and all of Django's connections in it are closed. Otherwise those
    connections are closed that are broken or older than Django's `CONN_MAX_AGE`, before and after the call.
    """
    before = None if name is None else running.set(name)
    if not thread_ends:
        _close(lambda db: (db.reset_queries(), db.close_old_connections()))
    try:
        with _around_call():
            yield
    finally:
        if before is not None:
            running.reset(before)
        _close(lambda db: db.connections.close_all() if thread_ends else db.close_old_connections())


@asynccontextmanager
async def surrounded_coroutine() -> AsyncIterator[None]:
    """Surround a coroutine on an event loop. In it, Django's asynchronous functions query in a thread of their own.

    That is what Django does around an asynchronous request. The caller enters `around_call` itself (`surrounded`).
    """
    if _django() is None:
        yield
        return
    asgiref: Any = sys.modules["asgiref.sync"]
    async with asgiref.ThreadSensitiveContext():
        try:
            yield
        finally:
            await asgiref.sync_to_async(_close)(lambda db: db.connections.close_all())


async def call(function: Callable[..., object], *arguments: object) -> Any:
    """Call a function or coroutine function of the application that mounts the gateway, surrounded; return its result.

    A plain function may query a database, so it runs in a thread, as FastAPI does with dependencies.
    """
    if not inspect.iscoroutinefunction(function):
        found = await asyncio.to_thread(_call_in_thread, function, *arguments)
        if not inspect.isawaitable(found):
            return found
        return await _await(lambda: found)
    return await _await(lambda: function(*arguments))


def _call_in_thread(function: Callable[..., object], *arguments: object) -> object:
    with surrounded():
        return function(*arguments)


async def _await(begin: Callable[[], Any]) -> Any:
    with _around_call():
        async with surrounded_coroutine():
            return await begin()


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of arguments for a function of the author, which may change it. Values that cannot be copied stay."""
    return {name: _copy(value) for name, value in arguments.items()}


def _copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 (a class may forbid it, as those of locks and connections do)
        return value


def _django() -> ModuleType | None:
    """The module `django.db`; `None` if this process has not set up Django."""
    apps: Any = sys.modules.get("django.apps")
    return import_module("django.db") if apps is not None and apps.apps.ready else None


def _close(close: Callable[[Any], object]) -> None:
    """Call `close` with `django.db`. Only logs an error, because the surrounded call has its outcome."""
    if (db := _django()) is None:
        return
    try:
        close(db)
    except Exception:
        log.exception("Django's connections were not closed")
