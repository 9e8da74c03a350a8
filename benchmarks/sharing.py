"""The time of ordinary users' turns while another user floods the workers with messages.

The benchmark measures with and without the limit `PERDURE_TURN__USER_CONCURRENCY`. There are two workers with four
threads each. 400 messages of one user are accepted before the workers start. Then four other users ask questions. Each
of them asks the next question when the turn of the previous question is settled. The result is the time from accepting
a question to settling its turn, by the database's clock.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.engine import URL

from benchmarks.agents import PATIENT, QUESTION
from benchmarks.report import Section
from benchmarks.setup import Setup, connected, scalar, until
from perdure.access.tenants import UserKey
from perdure.assembly import Addresses, assemble
from perdure.settings import Scope, SessionSettings, Settings, TurnSettings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.workers.publish.wake import CeleryWaker

NAME = "sharing"

_WORKERS, _THREADS = 2, 4
_FLOOD = 400
_ASKED = 60
_LATENCY_S = 0.5
_NO_LIMIT = 100_000
_DONE_S = 240.0
_UNSETTLED = "SELECT count(*) FROM turns WHERE settled_at IS NULL"
_SETTLED = "SELECT count(*) FROM turns WHERE settled_at IS NOT NULL"
_TIMES = """
    SELECT extract(epoch FROM settled_at - accepted_at) FROM turns WHERE user_id LIKE 'ordinary %' ORDER BY 1
"""
_TOOK = "SELECT extract(epoch FROM max(settled_at) - min(started_at)) FROM turns WHERE user_id = 'flood'"

Send = Callable[[str, str, str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A flood of messages in `conversations` conversations, or no flood if `conversations` is 0.

    `at_once` is the limit on a user's concurrent turns.
    """

    title: str
    name: str
    conversations: int
    at_once: int = 10


_KINDS = (
    Kind("no flood", "quiet", 0),
    Kind("flood, 400 conversations, no limit", "unlimited", _FLOOD, _NO_LIMIT),
    Kind("flood, 400 conversations, limit 10", "limited", _FLOOD),
    Kind("flood, 10 conversations, limit 10", "backlogs", 10),
)


def measure(setup: Setup) -> Section:
    """Measure all kinds of floods; returns the section."""
    found = [(kind, *_measured(setup, kind)) for kind in _KINDS]
    asked, flood = setup.scaled(_ASKED), setup.scaled(_FLOOD)
    return Section(
        name=NAME,
        title="An ordinary user's turn while another user floods the fleet",
        method=(
            f"{_WORKERS} workers with --concurrency {_THREADS}; a turn has two model calls, of which the first takes "
            f"{_LATENCY_S:g} s, and a tool call. Four ordinary users ask {asked} questions, each user one after "
            f"another, behind {flood} messages of the flooding user. Times are from accepting to settling."
        ),
        columns=["flood", "p50 ms", "p99 ms", "flood settled after s"],
        rows=[
            [kind.title, f"{_percentile_ms(times, 50):.0f}", f"{_percentile_ms(times, 99):.0f}", f"{took:.1f}"]
            for kind, times, took in found
        ],
        figures={
            f"{kind.name}_{name}": value
            for kind, times, took in found
            for name, value in (
                ("p50_ms", _percentile_ms(times, 50)),
                ("p99_ms", _percentile_ms(times, 99)),
                ("flood_s", took),
            )
        },
    )


def _percentile_ms(times: list[float], percent: int) -> float:
    """A percentile of `times` (seconds), in milliseconds."""
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1] * 1000


def _measured(setup: Setup, kind: Kind) -> tuple[list[float], float]:
    """Measure one kind of flood. Returns the seconds of each ordinary turn and the seconds of the whole flood.

    The flood lasts from the start of its first turn until its last turn is settled.
    """
    setup.progress(kind.title)
    variables = {
        "PERDURE_MODEL": f"benchmark:{_LATENCY_S:g}",
        "PERDURE_SESSION__SCOPE": "channel",
        "PERDURE_TURN__USER_CONCURRENCY": str(kind.at_once),
    }
    with setup.database("bench_sharing") as url, ExitStack() as workers:

        def start() -> None:
            for number in range(_WORKERS):
                arguments = ("-A", "perdure", "worker", "-n", f"w{number}@%h", "--concurrency", str(_THREADS))
                workers.enter_context(
                    setup.process("celery", *arguments, environment=setup.environment(url, **variables))
                )

        _play(setup, url, kind, start)
        with connected(url) as connection:
            times = [float(row[0]) for row in connection.execute(text(_TIMES))]
            took = connection.execute(text(_TOOK)).scalar_one()
    return times, float(took or 0)


def _play(setup: Setup, url: URL, kind: Kind, start: Callable[[], None]) -> None:
    settings = Settings(
        _env_file=None,
        agents="benchmarks.agents",
        session=SessionSettings(scope=Scope.CHANNEL),
        turn=TurnSettings(user_concurrency=kind.at_once),
    )
    broker = setup.servers.redis.url
    waker = CeleryWaker(settings, Addresses(str(url), broker, broker))
    runtime = assemble(settings, url.render_as_string(hide_password=False), waker)

    def send(user: str, channel: str, content: str) -> None:
        accept(runtime, Incoming(user=UserKey(user), channel=channel, text=content))

    for number in range(setup.scaled(_FLOOD) if kind.conversations else 0):
        send("flood", f"channel {number % kind.conversations}", PATIENT + QUESTION)
    start()
    if not kind.conversations:
        send("warm-up", "http", QUESTION)
    until(lambda: bool(scalar(url, _SETTLED) > 0), _DONE_S)
    askers = [
        threading.Thread(target=_ask, args=(url, send, f"ordinary {number}", setup.scaled(_ASKED) // 4 or 1))
        for number in range(4)
    ]
    for each in askers:
        each.start()
    for each in askers:
        each.join()
    until(lambda: bool(scalar(url, _UNSETTLED) == 0), _DONE_S)
    waker.close()
    runtime.database.close()


def _ask(url: URL, send: Send, user: str, questions: int) -> None:
    """Ask `questions` questions. Ask the next question when the turn of the previous one is settled."""
    with connected(url) as connection:
        waits = text(f"{_UNSETTLED} AND user_id = :user")
        for _ in range(questions):
            send(user, "http", PATIENT + QUESTION)
            while connection.execute(waits, {"user": user}).scalar_one():
                time.sleep(0.02)
