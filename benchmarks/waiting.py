"""Threads and memory of one worker process while many turns wait for a slow model.

The benchmark runs with two models. The first model sleeps in the worker process. The second model calls a simulated
server through the OpenAI SDK, so each waiting turn holds an open connection. Before the benchmark samples the threads
and memory, it checks that all turns wait: each turn has begun, and none has its first reply from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from sqlalchemy.engine import URL

from benchmarks.agents import PATIENT, QUESTION
from benchmarks.report import Section
from benchmarks.setup import Setup, scalar, until
from perdure.access.tenants import UserKey
from perdure.assembly import Addresses, assemble
from perdure.settings import Settings
from perdure.turns.inbox.accept import Accepted, accept
from perdure.turns.inbox.incoming import Incoming
from perdure.workers.publish.wake import CeleryWaker
from tests.models.openai_server import OpenAIServer, Player, Step, Wire, two_steps

NAME = "waiting"

_TURNS = 500
_WARM_UP = 20
_LATENCY_S = 20.0
_DONE_S = 120.0
_BEGUN_AND_NO_FURTHER = """
    SELECT count(*) FROM turns AS t
    WHERE status = 'running' AND NOT EXISTS (SELECT FROM messages WHERE turn_id = t.turn_id)
"""
_ANSWERED = "SELECT count(*) FROM turns WHERE status = 'done' AND steps = 2"


@dataclass(frozen=True, slots=True)
class Size:
    """The number of threads of a process, and its resident memory in KiB."""

    threads: int
    kib: float


@dataclass(frozen=True, slots=True)
class Waited:
    """The threads and memory of a worker process before `turns` turns wait, and while they wait."""

    turns: int
    before: Size
    during: Size

    @property
    def kib_each(self) -> float:
        """KiB of resident memory that each waiting turn adds."""
        return (self.during.kib - self.before.kib) / self.turns


def measure(setup: Setup) -> Section:
    """Measure a worker with the model that sleeps, then a worker with the model that calls a server."""
    turns = setup.scaled(_TURNS)
    inside = _wait(setup, turns, {"PERDURE_MODEL": f"benchmark:{_LATENCY_S:g}"})
    with OpenAIServer(player=_slow_first()) as server:
        outside = _wait(setup, turns, {"PERDURE_MODEL": "openai:test", "OPENAI_BASE_URL": server.base_url})
    return Section(
        name=NAME,
        title=f"{turns} turns that wait concurrently for a slow model, in one worker process",
        method=(
            f"celery -A perdure worker --concurrency {turns}, after a warm-up of {_WARM_UP} turns. Each of {turns} "
            f"users sends a message, whose first model call takes {_LATENCY_S:g} s: in the process, or through the "
            "OpenAI SDK with one connection per turn to a server on loopback. Threads and memory are sampled when all "
            "turns have begun and none has its first reply. All turns are answered."
        ),
        columns=["model", "threads before", "threads", "MiB before", "MiB", "KiB per waiting turn"],
        rows=[_row("in the process", inside), _row("OpenAI SDK", outside)],
        figures={**_figures("in_process", inside), **_figures("openai_sdk", outside)},
    )


def _wait(setup: Setup, turns: int, model: dict[str, str]) -> Waited:
    with (
        setup.database("bench_waiting") as url,
        setup.process(
            "celery",
            "-A",
            "perdure",
            "worker",
            "--concurrency",
            str(turns),
            environment=setup.environment(url, **model),
        ) as worker,
        _sender(setup, url) as send,
    ):
        setup.progress("warming the worker up")
        for number in range(_WARM_UP):
            send(f"warm-up {number}", QUESTION)
        until(lambda: bool(scalar(url, _ANSWERED) == _WARM_UP), _DONE_S)
        before = _size(worker)
        setup.progress(f"{turns} turns wait on {model['PERDURE_MODEL']}")
        for number in range(turns):
            send(f"user {number}", PATIENT + QUESTION)
        until(lambda: bool(scalar(url, _BEGUN_AND_NO_FURTHER) == turns), _LATENCY_S)
        during = _size(worker)
        until(lambda: bool(scalar(url, _ANSWERED) == _WARM_UP + turns), _LATENCY_S + _DONE_S)
    return Waited(turns, before, during)


@contextmanager
def _sender(setup: Setup, url: URL) -> Iterator[Callable[[str, str], Accepted]]:
    """Yield the function `send(user_id, text)`, which accepts a message in the benchmark's process."""
    settings = Settings(_env_file=None, agents="benchmarks.agents")
    broker = setup.servers.redis.url
    waker = CeleryWaker(settings, Addresses(str(url), broker, broker))
    runtime = assemble(settings, url.render_as_string(hide_password=False), waker)
    yield lambda user_id, content: accept(runtime, Incoming(user=UserKey(user_id), text=content))
    waker.close()
    runtime.database.close()


def _slow_first() -> Player:
    """Return a player, which makes the simulated model call a tool and then reply, in each turn.

    If the question starts with `PATIENT`, the model waits `_LATENCY_S` seconds before it calls the tool.
    """
    quick, slow = two_steps(), two_steps(_LATENCY_S)

    def play(body: Wire) -> Step:
        patient = str(body["messages"][-1]["content"]).startswith(PATIENT)
        return (slow if patient else quick)(body)

    return play


def _size(process: psutil.Popen) -> Size:
    return Size(process.num_threads(), process.memory_info().rss / 1024)


def _row(model: str, waited: Waited) -> list[str]:
    before, during = waited.before, waited.during
    return [
        model,
        str(before.threads),
        str(during.threads),
        f"{before.kib / 1024:.0f}",
        f"{during.kib / 1024:.0f}",
        f"{waited.kib_each:.0f}",
    ]


def _figures(model: str, waited: Waited) -> dict[str, float]:
    return {
        f"{model}_turns": waited.turns,
        f"{model}_threads": waited.during.threads,
        f"{model}_rss_before_kib": waited.before.kib,
        f"{model}_rss_kib": waited.during.kib,
        f"{model}_kib_a_turn": waited.kib_each,
    }
