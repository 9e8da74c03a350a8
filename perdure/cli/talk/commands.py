"""`perdure send` and `perdure chat`: talking to an agent from a terminal, through the ordinary queue."""

from __future__ import annotations

import math
import signal
import sys
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from types import FrameType
from typing import Annotated, Any

import typer

from perdure.access.tenants import parse_tenant
from perdure.channels.cli import CHANNEL
from perdure.cli import connecting
from perdure.cli.connecting import Tenant
from perdure.cli.display import AsJson, write_json, write_text
from perdure.cli.errors import FAILED, WRONG_USAGE, Failure
from perdure.cli.talk.prompt import Prompt
from perdure.errors import Unavailable
from perdure.runtime import Runtime
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.reading import SETTLED, Delays, SettlementWatch, read_turn

_LOOK_S = 0.25
"""How often it is looked whether the answer is delayed."""


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds.")
    return seconds


User = Annotated[str, typer.Option(help="Who speaks.")]


def send(
    text: Annotated[str | None, typer.Argument(help="What to say; - or nothing: what stdin holds.")] = None,
    *,
    user: User = "local",
    tenant: Tenant = None,
    channel: Annotated[str, typer.Option(help="The channel that it comes from.")] = CHANNEL,
    message_id: Annotated[str | None, typer.Option(help="The same id again is the same message.")] = None,
    session: Annotated[str | None, typer.Option(help="The session's id; default the user's own.")] = None,
    agent: Annotated[str | None, typer.Option(help="Who is spoken to; default the session's own.")] = None,
    wait: Annotated[
        float | None, typer.Option(min=0, callback=_finite, help="Seconds to wait for the reply, which is printed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a message.

    Prints the ids of the turn and the session, or with --wait the reply. Status 1 if the turn
    failed or is not settled when the time is up, or when a signal ends the waiting.
    """
    words = _text(text)
    if not words.strip():
        raise Failure("There is nothing to send: TEXT is empty.", WRONG_USAGE)
    given = {"user_id": user, "text": words, "channel": channel}
    session_id = None if session is None else str(connecting.parse_id(session, "session"))
    optional = {"message_id": message_id, "session_id": session_id, "agent": agent}
    named = {name: value for name, value in optional.items() if value is not None}
    incoming = parse_incoming({**given, **named}, tenant=parse_tenant(tenant))
    patience = _Patience()
    with connecting.runtime() as runtime:
        if wait is not None:
            patience.begin()
        accepted = accept(runtime, incoming)
        if wait is None:
            _write_accepted(accepted, as_json=as_json)
            return
        turn = _settled(runtime, accepted, wait, patience)
    over = "Interrupted" if patience.ended else f"No reply within {wait:g} s"
    _write_turn(turn, over, as_json=as_json)


def chat(
    user: User = "local",
    tenant: Tenant = None,
    agent: Annotated[str | None, typer.Option(help="Who is spoken to; default the first one defined.")] = None,
) -> None:
    """Talk to an agent.

    Reads stdin line by line if it is not a terminal.
    """
    with connecting.runtime() as runtime:
        if agent is not None:
            runtime.agents.get(agent)
        Prompt(runtime, user, agent, parse_tenant(tenant)).run()


def _text(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise Failure("There is nothing to send: give TEXT, or pipe it in.", WRONG_USAGE)
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise Failure(f"What came from stdin is not valid UTF-8 (at byte {error.start}).", WRONG_USAGE) from None


class _Interrupted(Exception):
    """A signal ends the waiting."""


class _Patience:
    """Somebody waits, until a signal: one that comes while the message is being accepted waits for its id."""

    def __init__(self) -> None:
        self.ended = False
        self._waiting = False

    def begin(self) -> None:
        """Signals are ours from here on; a second one ends the process as ever."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._end)

    def wait(self, settled: Future[None], seconds: float) -> None:
        """Return when the turn is settled, the time is up, or a signal comes."""
        try:
            self._waiting = True
            if not self.ended:
                wait_for((settled,), timeout=seconds)
            self._waiting = False
        except _Interrupted:
            return

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self.ended = True
        if self._waiting:
            raise _Interrupted


def _settled(runtime: Runtime, accepted: Accepted, seconds: float, patience: _Patience) -> dict[str, Any]:
    """The turn as it is once it is settled, the time is up, or a signal has come."""
    watch, delays = SettlementWatch(runtime.database), Delays(runtime.database, accepted.turn_id)
    settled, until = watch.settled(accepted.turn_id), time.monotonic() + seconds
    while not settled.done() and not patience.ended and (left_s := until - time.monotonic()) > 0:
        patience.wait(settled, min(left_s, _LOOK_S))
        with suppress(Unavailable):  # the watch goes on, and is told when the database is back
            _note(delays.look())
    watch.close()
    return read_turn(runtime.database, accepted.turn_id)


def _note(sentence: str | None) -> None:
    if sentence is not None:
        sys.stderr.write(f"{sentence}\n")
        sys.stderr.flush()


def _write_accepted(accepted: Accepted, *, as_json: bool) -> None:
    ids = {"turn_id": str(accepted.turn_id), "session_id": str(accepted.session_id)}
    if as_json:
        write_json({**ids, "seq": accepted.seq, "status": accepted.status, "duplicate": accepted.duplicate})
    else:
        write_text("\n".join(f"{name} {value}" for name, value in ids.items()))


def _write_turn(turn: dict[str, Any], over: str, *, as_json: bool) -> None:
    if as_json:
        write_json(turn)
    elif turn["status"] == "done":
        write_text(turn["reply"]["text"])
    if turn["status"] not in SETTLED:
        raise Failure(
            f"{over}: turn {turn['turn_id']} is {turn['status']}. "
            f"Look again with `perdure turns show {turn['turn_id']}`."
        )
    if turn["error"] is not None:
        raise Failure(f"{turn['error']['message']} ({turn['error']['code']})", FAILED)
