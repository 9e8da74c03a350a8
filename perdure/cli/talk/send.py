"""`perdure send`: accepts one message and, with `--wait`, prints its reply.

This module imports only what it needs to accept a message, because imports take most of the command's CPU time.
"""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.access.tenants import parse_tenant
from perdure.channels import CLI
from perdure.cli import collection, connecting
from perdure.cli.connecting import Tenant
from perdure.cli.display import AsJson, write_json, write_text
from perdure.cli.errors import FAILED, WRONG_USAGE, Failure
from perdure.cli.finite import finite
from perdure.errors import Unavailable
from perdure.servers.process.stop_signals import stop_signals

if TYPE_CHECKING:
    from perdure.runtime import AcceptingRuntime
    from perdure.turns.inbox.accept import Accepted

_LOOK_S = 0.25
"""Seconds between two checks whether the reply is delayed."""


User = Annotated[str, typer.Option(help="The id of the user who sends.")]
Conversation = Annotated[
    str | None, typer.Option(metavar="KEY", help="The key of a conversation; a new key begins one.")
]


def send(
    text: Annotated[str | None, typer.Argument(help="The message; `-` or none: read it from stdin.")] = None,
    *,
    user: User = "local",
    tenant: Tenant = None,
    channel: Annotated[str, typer.Option(help="The message's channel.")] = CLI,
    message_id: Annotated[str | None, typer.Option(help="Sending the same id again has no further effect.")] = None,
    conversation: Conversation = None,
    session: Annotated[str | None, typer.Option(help="A session's id; by default the user's live session.")] = None,
    agent: Annotated[str | None, typer.Option(help="The agent; by default the session's.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, callback=finite, help="Wait this long for the reply, and print it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a message.

    Prints the ids of the turn and the session, or with --wait the reply. The exit status is 1 if the turn fails, if it
    is not settled when the time is up, or if a signal ends the wait.
    """
    with collection.deferred():
        import perdure.workers.publish.wake  # noqa: F401 (what `connecting.accepting_runtime` imports)
        from perdure.turns.inbox.accept import accept
        from perdure.turns.inbox.incoming import parse_incoming

    content = _text(text)
    if not content.strip():
        raise Failure("There is nothing to send: TEXT is empty.", WRONG_USAGE)
    given = {"user_id": user, "text": content, "channel": channel}
    session_id = None if session is None else str(connecting.parse_id(session, "session"))
    optional = {"message_id": message_id, "conversation": conversation, "session_id": session_id, "agent": agent}
    named = {name: value for name, value in optional.items() if value is not None}
    incoming = parse_incoming({**given, **named}, tenant=parse_tenant(tenant))
    interruptible = _Wait()
    with connecting.accepting_runtime() as runtime:
        if wait is not None:
            interruptible.begin()
        accepted = accept(runtime, incoming)
        if wait is None:
            _write_accepted(accepted, as_json=as_json)
            return
        turn = _settled(runtime, accepted, wait, interruptible)
    over = "Interrupted" if interruptible.ended else f"No reply within {wait:g} s"
    _write_turn(turn, over, as_json=as_json)


def _text(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise Failure("There is nothing to send: give TEXT, or pipe it in.", WRONG_USAGE)
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise Failure(f"The text on stdin is not valid UTF-8 (at byte {error.start}).", WRONG_USAGE) from None


class _Interrupted(Exception):
    """A signal has ended the wait."""


class _Wait:
    """Waits for a turn; a signal ends the wait. If a signal arrives before `wait` is called, `wait` returns at once."""

    def __init__(self) -> None:
        self.ended = False
        self._waiting = False

    def begin(self) -> None:
        """Install handlers for the signals that end the wait. A second signal ends the process."""
        for number in stop_signals():
            signal.signal(number, self._end)

    def wait(self, settled: Future[None], seconds: float) -> None:
        """Wait until the turn is settled, `seconds` have passed, or a signal arrives."""
        try:
            self._waiting = True
            if not self.ended:
                wait_for((settled,), timeout=seconds)
            self._waiting = False
        except _Interrupted:
            return

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        self.ended = True
        if self._waiting:
            raise _Interrupted


def _settled(runtime: AcceptingRuntime, accepted: Accepted, seconds: float, interruptible: _Wait) -> dict[str, Any]:
    """Wait until the turn is settled, `seconds` have passed, or a signal arrives; returns the turn."""
    from perdure.turns.reading import Delays, SettlementWatch, read_turn

    watch, delays = SettlementWatch(runtime.database), Delays(runtime.database, accepted.turn_id)
    settled, until = watch.settled(accepted.turn_id), time.monotonic() + seconds
    while not settled.done() and not interruptible.ended and (left_s := until - time.monotonic()) > 0:
        interruptible.wait(settled, min(left_s, _LOOK_S))
        with suppress(Unavailable):  # the watch continues when the database is available again
            _note(delays.look())
    watch.close()
    return read_turn(runtime.database, accepted.turn_id)


def _note(text: str | None) -> None:
    if text is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _write_accepted(accepted: Accepted, *, as_json: bool) -> None:
    ids = {"turn_id": str(accepted.turn_id), "session_id": str(accepted.session_id)}
    if as_json:
        write_json({**ids, "seq": accepted.seq, "status": accepted.status, "duplicate": accepted.duplicate})
    else:
        write_text("\n".join(f"{name} {value}" for name, value in ids.items()))


def _write_turn(turn: dict[str, Any], over: str, *, as_json: bool) -> None:
    from perdure.turns.reading import SETTLED, cut_off

    if as_json:
        write_json(turn)
    elif turn["status"] == "done":
        write_text(turn["reply"]["text"])
        _note(cut_off(turn))
    if turn["status"] not in SETTLED:
        raise Failure(
            f"{over}: turn {turn['turn_id']} is {turn['status']}. "
            f"Look again with `perdure turns show {turn['turn_id']}`."
        )
    if turn["error"] is not None:
        raise Failure(f"{turn['error']['message']} ({turn['error']['code']})", FAILED)
