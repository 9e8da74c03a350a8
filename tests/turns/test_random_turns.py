"""The invariants of turns hold after random sequences of messages, crashes and cancellations, for each user alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from uuid import UUID

import pytest

from perdure import tool
from perdure.errors import Conflict
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.turns.cancel import cancel
from perdure.turns.run.loop import Runner
from tests.turns.harness import Crash, Harness
from tests.turns.scripted import calls, says

USERS = ("ana", "bob", "cho")
STEPS = 45
BOUNDARIES = [
    (moment, name, nth)
    for moment in ("before", "after")
    for name, nth in [("turns.step", 1), ("turns.step", 2), ("turns.settle", 1), ("turns.begin_next", 1),
                      ("turns.claim", 1), ("turns.step_joining", 1)]
]  # fmt: skip


@tool(effect="pure")
def pure() -> str:
    """Do something repeatable."""
    return "pure"


@tool
def unsafe() -> str:
    """Do something that must not be repeated."""
    return "unsafe"


class RandomTurns:
    """A random sequence of actions. `accepted` maps the id of each accepted message to its turn's id."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.random = random.Random(seed)  # noqa: S311 (no secret)
        self.accepted: dict[str, UUID] = {}
        self.number = 0
        harness.equip(pure, unsafe)
        harness.model.respond = self._speak  # type: ignore[method-assign]
        self._respond = type(harness.model).respond

    def _speak(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        chosen = self.random.random()
        if chosen < 0.5:
            line = says("said")
        elif chosen < 0.9:
            line = calls(*[(self.random.choice(["pure", "unsafe", "none"]), {})] * self.random.randint(1, 3))
        else:
            line = says("")
        self.harness.script(line)
        return self._respond(self.harness.model, request, call)

    def step(self) -> None:
        """Perform one random action."""
        action: Callable[[], None] = self.random.choices(
            [self.send, self.repeat, self.run, self.drain, self.cancel, self.crash, self.park],
            weights=[8, 1, 3, 2, 2, 4, 1],
        )[0]
        action()
        self.harness.move(self.random.choice([0, 1, 40]))

    def send(self) -> None:
        """Send a message with a random `on_busy`."""
        self.number += 1
        message_id = f"m{self.number}"
        on_busy = self.random.choice(["enqueue", "enqueue", "reject", "interrupt", "merge", "steer", "steer"])
        user_id = self.random.choice(USERS)
        try:
            with self.harness.affecting(user_id):
                sent = self.harness.send(message_id, user_id=user_id, message_id=message_id, on_busy=on_busy)
        except Conflict:
            assert on_busy == "reject"
            return
        assert not sent.duplicate
        self.accepted[message_id] = sent.turn_id

    def repeat(self) -> None:
        """Send an accepted message again."""
        if self.accepted:
            message_id = self.random.choice(list(self.accepted))
            user_id = self._sender(message_id)
            with self.harness.affecting(user_id):
                again = self.harness.send(message_id, user_id=user_id, message_id=message_id)
            assert (again.duplicate, again.turn_id) == (True, self.accepted[message_id])

    def run(self) -> None:
        """Run a random selection of the sessions."""
        for session_id in self._sessions():
            with self.harness.affecting(self.harness.session(session_id).user_id):
                self.harness.run(session_id, alone=True)

    def drain(self) -> None:
        """Start a drain with the wake-up of a random session."""
        for session_id in self._sessions()[:1]:
            Runner(self.harness.runtime, "drainer").drain(session_id)

    def cancel(self) -> None:
        """Cancel a random turn."""
        if self.accepted:
            message_id = self.random.choice(list(self.accepted))
            with self.harness.affecting(self._sender(message_id)):
                cancel(self.harness.runtime, self.accepted[message_id])

    def crash(self) -> None:
        """Crash a worker before or after a random commit, then wait until its lease has expired."""
        moment, name, nth = self.random.choice(BOUNDARIES)
        seen: list[str] = []

        def observe(at: str, statement: str) -> None:
            if (at, statement) == (moment, name):
                seen.append(name)
                if len(seen) == nth:
                    raise Crash

        with self.harness.hooked(observe):
            for session_id in self._sessions():
                try:
                    self.harness.run(session_id, alone=True)
                except Crash:
                    self.harness.move(31)

    def park(self) -> None:
        """Let a draining worker claim and park a random selection of the sessions."""
        runner = Runner(self.harness.runtime, "draining")
        runner.keeper.begin_shutdown()
        for session_id in self._sessions():
            with self.harness.affecting(self.harness.session(session_id).user_id):
                runner.run(session_id, alone=True)

    def _sender(self, message_id: str) -> str:
        return str(self.harness.sql("SELECT user_id FROM inbox WHERE message_id = %(id)s", id=message_id)[0].user_id)

    def _sessions(self) -> list[UUID]:
        rows = self.harness.sql("SELECT session_id FROM sessions ORDER BY session_id")
        return self.random.sample([row.session_id for row in rows], self.random.randint(0, len(rows)))

    def come_to_rest(self) -> None:
        """Run the sessions until every turn is settled."""
        for _ in range(12):
            self.harness.move(31)
            for row in self.harness.sql("SELECT session_id FROM sessions WHERE unsettled > 0"):
                self.harness.run(row.session_id, alone=True)
            if not self.harness.sql("SELECT 1 FROM turns WHERE settled_at IS NULL"):
                return
        raise AssertionError("a turn is still unsettled")

    def judge(self) -> None:
        """Check that each message was answered or cancelled exactly once, in the order accepted."""
        for message_id, turn_id in self.accepted.items():
            turn = self.harness.turn(turn_id)
            rows = self.harness.sql("SELECT turn_id FROM messages WHERE message_id = %(id)s", id=message_id)
            if turn["status"] == "cancelled":
                assert turn["reply"] is None
                assert len(rows) <= 1
            else:
                assert turn["status"] in {"done", "failed"}
                assert turn["reply"] is not None
                assert [str(row.turn_id) for row in rows] == [turn["turn_id"]]  # of the turn that the message joined
        for row in self.harness.sql("SELECT session_id, lease_until, state FROM sessions"):
            assert (row.lease_until, row.state) == (None, "active")
            seqs = [
                each.seq
                for each in self.harness.sql(
                    "SELECT t.seq FROM messages AS m JOIN turns AS t USING (turn_id)"
                    " WHERE m.session_id = %(id)s ORDER BY m.seq",
                    id=row.session_id,
                )
            ]
            assert seqs == sorted(seqs), "turns run in the order accepted, one at a time"
        assert not self.harness.sql("SELECT 1 FROM tool_effects WHERE status = 'intended'")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
def test_a_random_sequence(harness: Harness, seed: int) -> None:
    """The invariants hold after a random sequence of actions. The same seed repeats the sequence."""
    random_turns = RandomTurns(harness, seed)
    for _ in range(STEPS):
        random_turns.step()
        harness.check()
    random_turns.come_to_rest()
    random_turns.judge()
