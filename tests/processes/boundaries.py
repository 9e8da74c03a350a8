"""The places at which a turn's worker can be killed, and a runner that kills the worker at one place.

A place is the moment before or after a commit, a point in a tool, or a model call. The places lie between
`turns.submit` and the delivery of the reply. A test records the places that a turn without faults passes, and
compares them with this module's list. So the list contains every commit of the engine.

`CaseRunner.run` plays one case. It arms a fault, submits a message, and waits until the fault has fired. If the
submission has no response at that moment, it submits the message again. Next, the test's own process accepts a
second message. Finally, it waits until both turns are settled and the reply to the first message is delivered.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from perdure.certify.boundaries import PERIODIC, REPEATABLE, is_unrelated
from tests.processes.faults import Effect, Fired, Place, wait_until
from tests.processes.installation import ADAPTED, JUDGING, MODULES, NATIVE, Installation
from tests.processes.model_server import PLANS, Gate, ModelServer
from tests.processes.nodes import RedisContainer
from tests.processes.receiver import Delivery, Receiver

ALONE = ("pure", "idempotent", "unsafe", "probed")
SIDE_BY_SIDE = "all"
KINDS = (*ALONE, SIDE_BY_SIDE)

_TO_CLAIM = ("turns.enqueue", "turns.accept", "turns.claim_due")
_FROM_SETTLE = ("turns.settle", "deliveries.take", "deliveries.delivered")
MODEL_CALLS = 2


def commits(kind: str, agent: str = NATIVE) -> list[str]:
    """The names of the commits of one undisturbed turn, in order."""
    tools = PLANS[kind]
    finished = ["turns.finish_effect"] * len(tools) if len(tools) > 1 else []
    begun, repaired = (["turns.keep_instructions"], ["turns.step"]) if agent == JUDGING else ([], [])
    changed = ["turns.change_arguments"] * len(tools) if agent == JUDGING else []
    return [*_TO_CLAIM, *begun, "turns.step", *changed, *finished, "turns.step", *repaired, *_FROM_SETTLE]


def passed(kind: str, agent: str = NATIVE) -> list[tuple[str, str]]:
    """The places that one undisturbed turn passes, as sorted `(moment, name)`. A place passed twice is listed twice."""
    boundaries = [(moment, name) for name in commits(kind, agent) for moment in ("before", "after")]
    points = [("within", f"{tool}.{point}") for tool in PLANS[kind] for point in ("entered", "acted")]
    return sorted(boundaries + points)


def places(kind: str, agent: str = NATIVE) -> list[Place]:
    """The places at which the tests kill the worker of a turn.

    These are the places of `passed`, and one place within each model call. Up to the claim and from the settlement on,
    a turn does the same whatever its tools are: of the `KINDS`, only `SIDE_BY_SIDE` has these places. The first of the
    `KINDS` also has the moments before and after each `PERIODIC` commit.
    """
    if (kind, agent) == (KINDS[0], NATIVE):
        return [*_ways(kind, agent), *(Place(moment, name) for name in PERIODIC for moment in ("before", "after"))]
    return _ways(kind, agent)


def places_of_judging() -> list[Place]:
    """The places that a turn of `JUDGING` has in addition to those of a turn of `NATIVE`."""
    others = _ways(KINDS[0], NATIVE)
    return [place for place in _ways(KINDS[0], JUDGING) if place not in others]


def _ways(kind: str, agent: str) -> list[Place]:
    found = passed(kind, agent)
    ways = [Place(*each, nth=found[:number].count(each) + 1) for number, each in enumerate(found)]
    ways += [Place("within", "model", nth) for nth in range(1, MODEL_CALLS + 1)]
    return [each for each in ways if kind == SIDE_BY_SIDE or each.name not in (*_TO_CLAIM, *_FROM_SETTLE)]


@dataclass(frozen=True, slots=True)
class Case:
    """One turn of the kind `kind` of the agent `agent`. The turn's worker is killed at `place`."""

    kind: str
    place: Place
    agent: str = NATIVE

    def __str__(self) -> str:
        return f"{self.kind}-{self.place}" if self.agent == NATIVE else f"{self.agent}-{self.kind}-{self.place}"


CASES = [Case(kind, place, agent) for agent in (NATIVE, ADAPTED) for kind in KINDS for place in places(kind, agent)]
CASES += [Case(KINDS[0], place, JUDGING) for place in places_of_judging()]


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The result of a case."""

    text: str
    second_text: str
    first: dict[str, Any]
    second: dict[str, Any]
    messages: list[Any]
    effects: list[Effect]
    statuses: dict[str, str]
    """Statuses of the effect rows, by tool."""
    deliveries: list[Delivery]


class CaseRunner:
    """An installation with two workers, which have the agent `agent`. It plays one case at a time."""

    def __init__(self, database_url: str, directory: Path, agent: str = NATIVE) -> None:
        with ExitStack() as stack:
            self.model_server = ModelServer()
            stack.enter_context(self.model_server.server)
            stack.callback(self.model_server.close)
            self.receiver = Receiver()
            stack.callback(self.receiver.close)
            redis = RedisContainer("redis", directory / "redis")
            stack.callback(redis.teardown)
            self.installation = Installation(database_url, redis, self.model_server, directory, agent=agent)
            stack.callback(self.installation.close)
            self._app = Celery("a sender", broker=redis.url, backend=redis.url)
            stack.callback(self._app.close)
            module = MODULES[JUDGING if agent == NATIVE else agent]  # that of `JUDGING` has `NATIVE`, too
            for _ in range(2):
                self.installation.worker(PERDURE_AGENTS=module)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Stop the workers and the servers."""
        self._stack.close()

    def undisturbed(self, kind: str, agent: str = NATIVE) -> list[tuple[str, str]]:
        """Run an undisturbed turn; returns its places, sorted. The places of `REPEATABLE` commits are listed once."""
        faults = self.installation.faults
        for worker in self.installation.workers:
            worker.container.ready()
        since = len(faults.notes())
        text = f"{kind}: undisturbed {agent}"
        turn_id = self._submit(text, text, agent)["turn_id"]
        self.installation.settled(turn_id)
        self._delivered(turn_id, since)
        seen: list[tuple[str, str]] = []
        for note in faults.notes(since):
            place = (note.moment, note.name)
            if not is_unrelated(note.name) and not (note.name in REPEATABLE and place in seen):
                seen.append(place)
        return sorted(seen)

    def run(self, case: Case) -> CaseOutcome:
        """Play one case."""
        text, second_text = f"{case.kind}: {case.place} {case.agent}", f"afterwards: {case}"
        since = len(self.installation.faults.notes())
        with self._killing(case, text) as struck:
            result = self._send(text, str(case), case.agent)
            struck()
            accepted = result.result if result.ready() else self._submit(text, str(case), case.agent)
            second = self.installation.accept(second_text, user=str(case), message_id=f"2-{case}", agent=case.agent)
        first_turn, second_turn = self.installation.settled(accepted["turn_id"], second.turn_id)
        self._delivered(accepted["turn_id"], since)
        return CaseOutcome(
            text,
            second_text,
            first_turn,
            second_turn,
            self.installation.transcript(second.session_id),
            self.installation.faults.effects(text),
            self._effect_statuses(accepted["turn_id"]),
            self.receiver.of(accepted["turn_id"]),
        )

    @contextmanager
    def _killing(self, case: Case, text: str) -> Iterator[Callable[[], Fired]]:
        """Prepare the kill; yields a function that waits for the kill, restarts the worker and returns the `Fired`."""
        faults = self.installation.faults
        if case.place.name == "model":
            model_gate = self.model_server.gate(text, case.place.nth)
            yield lambda: self._kill_in_model_call(model_gate, text)
            model_gate.opened.set()
            return
        faults.arm(case.place)
        gate = (
            self.model_server.gate(text) if case.place.name == "turns.renew" else None
        )  # the model call lasts until the lease is renewed
        yield lambda: self._restart_killed(wait_until(faults.fired, f"the fault at {case.place} fires"))
        if gate is not None:
            gate.opened.set()

    def _kill_in_model_call(self, gate: Gate, text: str) -> Fired:
        gate.wait()
        rows = self.installation.query(
            "SELECT session_id FROM turns JOIN inbox USING (turn_id) WHERE text = %(text)s", text=text
        )
        struck = Fired(time.monotonic(), self.installation.lease_owner(rows[0].session_id))
        os.kill(struck.pid, signal.SIGKILL)
        return self._restart_killed(struck)

    def _restart_killed(self, struck: Fired) -> Fired:
        """Wait until the killed worker has ended, then start it again; returns `struck`."""
        worker = next(each for each in self.installation.workers if each.pid == struck.pid)
        worker.container.wait()
        worker.container.start()
        return struck

    def _send(self, text: str, task_id: str, agent: str) -> AsyncResult:
        message = {"user_id": task_id, "text": text, "agent": agent, "reply_to": {"url": self.receiver.url}}
        return self._app.send_task("turns.submit", kwargs=message, queue="ingress", task_id=task_id)

    def _submit(self, text: str, task_id: str, agent: str) -> dict[str, Any]:
        """Send a message under `task_id`, and wait until it is accepted. A repeated call returns the same turn."""
        accepted: dict[str, Any] = self._send(text, task_id, agent).get(timeout=20)
        return accepted

    def _delivered(self, turn_id: str, since: int) -> None:
        """Wait until the reply is delivered and no process is still committing the delivery."""

        def done() -> bool:
            rows = self.installation.query("SELECT status FROM deliveries WHERE turn_id = %(id)s", id=turn_id)
            notes = self.installation.faults.notes(since)
            began, ended = (
                {note.pid for note in notes if (note.moment, note.name) == (moment, "deliveries.delivered")}
                for moment in ("before", "after")
            )
            struck = self.installation.faults.fired()
            killed = {struck.pid} if struck is not None else set()
            return [row.status for row in rows] == ["delivered"] and bool(began) and began <= ended | killed

        wait_until(done, f"the reply of turn {turn_id} is delivered")

    def _effect_statuses(self, turn_id: str) -> dict[str, str]:
        rows = self.installation.query("SELECT tool, status FROM tool_effects WHERE turn_id = %(id)s", id=turn_id)
        return {row.tool: row.status for row in rows}
