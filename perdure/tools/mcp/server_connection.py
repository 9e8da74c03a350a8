"""Connects a process to one MCP server, lists and calls the server's tools, and reconnects.

`keep` runs on the event loop until the process ends. The threads that run turns call `tools` and `call_tool`. While the
server is unavailable, its last list of tools stays valid, so that the prompts of turns do not change. A call during
that time fails with a message for the model.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, suppress
from importlib.metadata import version
from typing import Any, Literal

import anyio
from mcp import Client, ClientSession, MCPError
from mcp.client import IncomingMessage
from mcp.client.subscriptions import SubscriptionLost
from mcp.shared.dispatcher import ProgressFnT
from mcp_types import (
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    ToolListChangedNotification,
)
from mcp_types import Tool as Listed
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from perdure.clock import Clock
from perdure.errors import Abandoned
from perdure.resilience.registry import Breaker
from perdure.resilience.retry import backoff_s
from perdure.settings import RetrySettings
from perdure.text.untrusted import first_line
from perdure.tools.mcp.faults import (
    NOT_SENT,
    UNANSWERED,
    UNHEALTHY,
    UNREADABLE,
    MalformedAnswer,
    NoAnswer,
    NotConnected,
)
from perdure.tools.mcp.filtering import FilteredTransport, Streams
from perdure.tools.mcp.http import http
from perdure.tools.mcp.server import McpServer
from perdure.tools.mcp.stdio import stdio
from perdure.tools.mcp.tool import RemoteTool, usable_tools, without_malformed
from perdure.tools.registry import ToolContext

log = logging.getLogger(__name__)

EFFECT_ID = "perdure/effect_id"
"""The field of MCP's `_meta` that carries a call's idempotency key."""

RECONNECTS = RetrySettings(base_s=0.5, multiplier=2, cap_s=60, jitter=0.25)
"""The back-off before reconnecting. `max_attempts` has no effect, since the number of attempts is unlimited."""

RETURN_S = 10.0
"""After a connection is lost, calls wait up to this many seconds for the next connection."""

_STEADY_S = 60.0  # a connection that lasted this long resets the back-off
_MAX_TOOLS = 200
_MAX_PAGES = _MAX_TOOLS
_RELIST_PAUSE_S = 1.0  # the pause between two listings
_LISTEN_S = 30.0
_FRESH_S = 60.0  # the age at which a list of tools is read again, if the server may not announce its changes
_SETTLE_S = 2.0  # how long a lost connection stays open for answers to running calls
_BEFORE_S, _BEFORE = 0.5, 0.9
_LOOK_UP_S = 0.1
_POLL_S = 0.02


class ServerConnection:
    """A server, its current connection and its tools."""

    def __init__(
        self,
        server: McpServer,
        *,
        breaker: Breaker,
        clock: Clock,
        jitter: Callable[[], float],
        timeout_s: float,
        process_groups: set[int],
    ) -> None:
        """Create the connection; `keep` opens it.

        `jitter` returns a number from [0, 1) for the back-off. `timeout_s` is the time limit of a call, unless the
        server's declaration overrides it.
        """
        self._server = server
        self._breaker = breaker
        self._clock = clock
        self._jitter = jitter
        self._timeout_s = server.timeout_s or timeout_s
        self._process_groups = process_groups
        self._first_deadline = clock.monotonic() + server.connect_timeout_s
        self._first_attempt_over = threading.Event()
        self._mode: Literal["auto", "legacy"] = "auto"
        self._has_connected = False
        self._version: str | None = None
        self._reported: set[str] = set()
        self._listed: list[Listed] | None = None
        self._tools: tuple[RemoteTool, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: ClientSession | None = None
        self._ended = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._closing = False
        self._reconnected_by = -math.inf
        self._listing_due = anyio.Event()
        self._must_list = False
        self._stale_at = math.inf
        self._calls: set[Future[CallToolResult]] = set()

    def tools(self) -> tuple[RemoteTool, ...]:
        """The tools of the last listing. Waits until the first attempt to connect has ended or timed out."""
        left_s = self._first_deadline - self._clock.monotonic()
        if not self._first_attempt_over.wait(max(0.0, left_s)) and left_s > 0:
            log.warning(
                "MCP server %s is not connected yet; its agents have none of its tools until then", self._server.name
            )
        if self._clock.monotonic() >= self._stale_at:
            self._stale_at = math.inf
            self._request_listing()
        return self._tools

    def call_tool(self, tool: str, arguments: Mapping[str, Any], context: ToolContext) -> CallToolResult:
        """Call the server's `tool`, and return its answer.

        Raises:
            CircuitBreakerOpen: the server failed too often recently. Failures in other processes count, too.
            NotConnected: the server is not connected; the call was not sent.
            NoAnswer, TimeoutError, Abandoned, CancelledError: the call was sent, and no answer arrived.
            MalformedAnswer: the answer is malformed.
            MCPError: the server rejects the call.
        """
        answer = self._breaker.execute(lambda: self._answer(tool, arguments, context), self._timeout_s)
        if isinstance(answer, MCPError):
            raise answer
        return answer

    def _answer(self, tool: str, arguments: Mapping[str, Any], context: ToolContext) -> CallToolResult | MCPError:
        """The server's result or rejection. Does not raise a rejection, so the breaker counts it as a success."""
        # This limit is slightly shorter than the turn's time-out. Otherwise the turn would count this thread as leaked.
        until = self._clock.monotonic() + max(self._timeout_s - _BEFORE_S, self._timeout_s * _BEFORE)
        patient_until = until - self._timeout_s / 2
        meta = {EFFECT_ID: str(context.effect_id)}
        params = CallToolRequestParams.model_validate({"name": tool, "arguments": arguments, "_meta": meta})
        request = CallToolRequest(params=params)
        while True:
            session, loop = self._connected(patient_until, context)
            try:
                return self._answer_of(session, loop, request, context, until)
            except NotConnected:  # not sent: try again on the next connection
                if not self._ended.is_set() or self._clock.monotonic() >= patient_until:
                    raise

    def _connected(self, patient_until: float, context: ToolContext) -> tuple[ClientSession, asyncio.AbstractEventLoop]:
        """The session and its event loop.

        If the connection was lost recently, waits for the next connection, until `patient_until` at the latest.

        Raises:
            NotConnected: the server is not connected.
        """
        while True:
            session, loop = self._session, self._loop
            if session is not None and loop is not None and not self._ended.is_set():
                return session, loop
            if self._clock.monotonic() >= min(self._reconnected_by, patient_until) or context.cancelled.wait(
                _LOOK_UP_S
            ):
                raise NotConnected("not connected")

    def _answer_of(
        self,
        session: ClientSession,
        loop: asyncio.AbstractEventLoop,
        request: CallToolRequest,
        context: ToolContext,
        until: float,
    ) -> CallToolResult | MCPError:
        sending = session.send_request(request, CallToolResult, progress_callback=_reporting(context))
        try:
            future = asyncio.run_coroutine_threadsafe(sending, loop)
        except RuntimeError as error:  # the loop is closed: the process is ending
            sending.close()
            raise NotConnected("not connected") from error
        self._calls.add(future)
        try:
            return self._await(future, context, until)
        except MCPError as error:
            if error.code not in UNHEALTHY | UNANSWERED:
                self._request_listing()  # the server may have changed the tool, or have dropped the session
            return _classify(error)
        except ValidationError as error:
            raise MalformedAnswer("it is not the result of a tool") from error
        finally:
            self._calls.discard(future)

    def _await(self, future: Future[CallToolResult], context: ToolContext, until: float) -> CallToolResult:
        """Wait for the answer. If no answer arrives in time, cancel the call; the SDK then notifies the server."""
        try:
            while not future.done():
                left_s = until - self._clock.monotonic()
                if context.cancelled.is_set():
                    raise Abandoned("the turn no longer needs it")
                if left_s <= 0:
                    self._request_listing(must=True)
                    raise TimeoutError(f"none within {self._timeout_s:g} s")
                wait([future], timeout=min(left_s, _LOOK_UP_S))
            return future.result()
        finally:
            future.cancel()

    def _request_listing(self, *, must: bool = False) -> None:
        """Have the event loop list the server's tools again.

        If `must`, and the server does not answer, `keep` reconnects. Otherwise a server that is busy with a call may
        answer later.
        """
        self._must_list = self._must_list or must
        with suppress(RuntimeError):  # the loop is closed: the process is ending
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._set_listing_due)

    def _set_listing_due(self) -> None:
        self._listing_due.set()

    async def keep(self) -> None:
        """Connect and reconnect until `end` is called."""
        self._loop = asyncio.get_running_loop()
        try:
            with anyio.CancelScope() as self._scope:
                await self._stay_connected()
        finally:
            self._reconnected_by = -math.inf
            self._first_attempt_over.set()

    def end(self) -> None:
        """Make `keep` disconnect and return; called on the event loop.

        Cancels the anyio scope in `keep`, not the asyncio task that runs `keep`. If the task were cancelled, `stdio`
        would be interrupted while `stdio` ends the server's process.
        """
        self._closing = True
        if self._scope is not None:
            self._scope.cancel()

    async def _stay_connected(self) -> None:
        tried = 0
        while not self._closing:
            since = self._clock.monotonic()
            why = await self._connect_until_lost()
            if self._server.url is None and not self._has_connected:
                # Some servers end if their first message is not `initialize`, which the newest protocol does not have.
                self._mode = "legacy" if self._mode == "auto" else "auto"
                if self._mode == "legacy":
                    continue
            tried = 1 if self._clock.monotonic() - since >= _STEADY_S else tried + 1
            pause_s = backoff_s(RECONNECTS, tried, self._jitter())
            text = "MCP server %s is not connected (%s); calls of its %d tools fail; next attempt in %.1f s"
            log.warning(text, self._server.name, why, len(self._tools), pause_s)
            self._first_attempt_over.set()
            await self._pause(pause_s)

    async def _connect_until_lost(self) -> str:
        """Connect, and wait until the connection ends; returns the reason for its end."""
        try:
            await self._connect()
        except Exception as error:
            log.debug("MCP server %s", self._server.name, exc_info=error)
            return _describe(_first(error))
        else:
            return "the server closed the connection"
        finally:
            if self._session is not None:
                self._reconnected_by = self._clock.monotonic() + RETURN_S
            self._session = None

    async def _connect(self) -> None:
        """Connect; return or raise when the connection has ended."""
        self._ended = ended = anyio.Event()
        self._listing_due = anyio.Event()
        self._must_list = False
        self._version = None
        with anyio.fail_after(self._server.connect_timeout_s) as limit:
            async with Client(
                FilteredTransport(self._transport(ended), ended, self._check_list),
                client_info=Implementation(name="perdure", version=version("perdure")),
                message_handler=self._on_message,
                mode=self._mode,
                cache=None,
            ) as client:
                self._version = client.protocol_version
                await self._list(client)
                self._has_connected = True
                limit.deadline = math.inf
                self._reconnected_by = math.inf  # a call may notice a lost connection before this task does
                self._session = client.session
                self._first_attempt_over.set()
                log.info("MCP server %s is connected: %d tools", self._server.name, len(self._tools))
                try:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._listen, client)
                        tasks.start_soon(self._list_again, client)
                        await ended.wait()
                        tasks.cancel_scope.cancel()
                finally:
                    ended.set()
                    await self._settle()

    async def _settle(self) -> None:
        """Wait for the answers to running calls: those that a server over HTTP refuses are sent again later."""
        with anyio.move_on_after(_SETTLE_S):
            while self._calls:  # noqa: ASYNC110 (threads take calls off)
                await anyio.sleep(_POLL_S)

    def _transport(self, ended: anyio.Event) -> AbstractAsyncContextManager[Streams]:
        url = self._server.url
        return stdio(self._server, self._process_groups) if url is None else http(self._server, url, ended)

    async def _list(self, client: Client) -> None:
        """List the server's tools."""
        listed: list[Listed] = []
        cursor: str | None = None
        if client.server_capabilities.tools is not None:
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                listed += page.tools
                last, cursor = cursor, page.next_cursor or None
                if cursor in {None, last} or len(listed) > _MAX_TOOLS:
                    break
        if listed != self._listed:  # what is wrong with a list is logged once
            if len(listed) > _MAX_TOOLS or cursor is not None:
                text = "MCP server %s lists more tools than the %d that are used"
                log.warning(text, self._server.name, min(len(listed), _MAX_TOOLS))
            self._tools = usable_tools(self._server, listed[:_MAX_TOOLS], self.call_tool)
            self._listed = listed
        self._stale_at = math.inf if self._announces(client) else self._clock.monotonic() + _FRESH_S

    def _announces(self, client: Client) -> bool:
        """Whether news of the server's tools arrives for certain: over HTTP, older protocols may have no channel."""
        if self._server.url is None:
            return True
        offered = client.server_capabilities.tools
        modern = client.protocol_version in MODERN_PROTOCOL_VERSIONS
        return modern and offered is not None and bool(offered.list_changed)

    def _check_list(self, listing: dict[str, Any]) -> dict[str, Any]:
        if self._version is None:
            return listing
        fit, faults = without_malformed(listing, self._version, _MAX_TOOLS)
        for fault in faults:
            if fault not in self._reported and len(self._reported) < _MAX_TOOLS:
                self._reported.add(fault)
                log.warning("a tool of MCP server %s is not offered to models: %s", self._server.name, fault)
        return fit

    async def _list_again(self, client: Client) -> None:
        """List the tools again on request. Ends the connection if a listing that must succeed gets no answer."""
        while True:
            await self._listing_due.wait()
            self._listing_due = anyio.Event()
            must, self._must_list = self._must_list, False
            try:
                with anyio.fail_after(self._server.connect_timeout_s):
                    await self._list(client)
            except TimeoutError:
                if must or not self._calls:
                    raise
                self._listing_due.set()
            except MCPError as error:
                if must or error.code not in UNHEALTHY | UNANSWERED:
                    raise
                self._stale_at = self._clock.monotonic() + _FRESH_S  # the session may have outlived a rate limit
            await anyio.sleep(_RELIST_PAUSE_S)

    async def _listen(self, client: Client) -> None:
        """Subscribe to changes of the list of tools. Servers with an older protocol notify without a subscription."""
        offered = client.server_capabilities.tools
        if client.protocol_version not in MODERN_PROTOCOL_VERSIONS or offered is None or not offered.list_changed:
            return
        while True:
            try:
                async with client.listen(tools_list_changed=True) as news:
                    async for _ in news:
                        self._listing_due.set()
            except (MCPError, SubscriptionLost) as error:
                log.debug("MCP server %s ended the subscription to changes: %s", self._server.name, _describe(error))
            await anyio.sleep(_LISTEN_S)
            self._listing_due.set()  # the server may have changed its tools while there was no subscription

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self._listing_due.set()

    async def _pause(self, seconds: float) -> None:
        """Wait `seconds`, measured by the injected clock."""
        until = self._clock.monotonic() + seconds
        while (left_s := until - self._clock.monotonic()) > 0:  # noqa: ASYNC110 (a clock that a test moves has no event)
            await anyio.sleep(min(left_s, _LOOK_UP_S))


def _classify(error: MCPError) -> MCPError:
    """Return `error` if a healthy server rejected the request; otherwise raise the matching exception."""
    if error.code == NOT_SENT:
        raise NotConnected(error.message) from error
    if error.code in UNANSWERED:
        raise NoAnswer(error.message) from error
    if error.code in UNREADABLE:
        raise MalformedAnswer(first_line(error.message)) from error
    if error.code in UNHEALTHY:
        raise error
    return error


def _first(error: BaseException) -> BaseException:
    """The first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe(error: BaseException) -> str:
    return first_line(f"{type(error).__name__}: {error}").removesuffix(":")


def _reporting(context: ToolContext) -> ProgressFnT:
    """Passes on the progress that a server reports of a call: its message, or its numbers."""

    async def report(progress: float, total: float | None, message: str | None) -> None:
        context.progress(message or (f"{progress:g}" if total is None else f"{progress:g} of {total:g}"))

    return report
