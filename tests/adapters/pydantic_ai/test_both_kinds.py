"""One suite of the turn for perdure's own agents and for agents of pydantic-ai.

Both kinds answer the same scripted model with the same tools, so their rows are the same: after a crash at any commit,
for calls in doubt, for approvals over restarts, when a turn is cancelled, drained or taken over, and when a user is
erased.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal
from uuid import UUID

import pytest

from perdure import GuardRejected, ToolCalled, ToolCalling, required
from perdure.access.tenants import UserKey
from perdure.errors import ContextTooLong
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from perdure.text.untrusted import cut
from perdure.tools.registry import MAX_RESULT_CHARS, DidNotHappen, Happened, Unknown
from perdure.turns.calls.approvals import DENIED, EXPIRED, decide, parse_decision
from perdure.turns.calls.result_values import UNKNOWN_OUTCOME
from perdure.turns.cancel import cancel
from perdure.turns.lease.claim import NotNeeded, Ran
from perdure.turns.run.call_model import size_of_request
from perdure.turns.run.loop import Runner
from tests.adapters.pydantic_ai.conftest import KINDS, Bench, Tool
from tests.turns.harness import PATIENCE_S, Harness, until
from tests.turns.scripted import calls, says, spoken

DECIDED_S = 31
"""Seconds after which a lease and the time limit of a tool, both 30 s, have passed."""

ONE = (calls(("act", {"amount": 1})), says("done"))


def _statuses(harness: Harness) -> list[str]:
    return [row.status for row in harness.sql("SELECT status FROM tool_effects ORDER BY message_seq, position")]


def _again(harness: Harness, session_id: UUID, lines: Sequence[ModelReply]) -> None:
    """Run the session after a crash, with those of the model's `lines` that no commit has stored."""
    said = harness.sql("SELECT count(*) FROM messages WHERE role = 'assistant'")[0][0]
    harness.script(*lines[said:])
    harness.move(DECIDED_S)
    harness.run(session_id)


def test_the_rows_of_a_turn(harness: Harness, bench: Bench) -> None:
    """A turn with two rounds leaves the same transcript, effects, usage and steps."""
    bench.equip(Tool("look", "pure"), Tool("act"))
    harness.script(calls(("look", {})), calls(("look", {"amount": 1}), ("act", {"amount": 2})), says("done"))
    turn = harness.ask("hello")
    assert harness.lines(UUID(turn["session_id"])) == [
        ("user", "hello"),
        ("assistant", ""),
        ("tool", "look 0"),
        ("assistant", ""),
        ("tool", "look 1"),
        ("tool", "act 2"),
        ("assistant", "done"),
    ]
    assert (turn["status"], turn["steps"], turn["usage"]["input_tokens"], turn["usage"]["output_tokens"]) == (
        "done", 3, 30, 12,
    )  # fmt: skip
    assert _statuses(harness) == ["done"] * 3
    rows = harness.sql("SELECT tool, effect, effect_id, waits_for, approver FROM tool_effects ORDER BY message_seq")
    assert [(row.tool, row.effect, row.waits_for, row.approver) for row in rows] == [
        ("look", "pure", None, None),
        ("look", "pure", None, None),
        ("act", "unsafe", None, None),
    ]
    assert [(name, effect_id) for name, effect_id in bench.ran[:1]] == [("look", rows[0].effect_id)]


def test_the_next_turn_continues_the_conversation(harness: Harness, bench: Bench) -> None:
    """The model of the second turn receives the messages of the first."""
    bench.equip(Tool())
    harness.script(*ONE)
    harness.ask("first")
    harness.script(says("again"))
    harness.ask("second")
    told = [(message.role, message.content) for message in spoken(harness.model.requests[-1])]
    assert told == [
        ("user", "first"), ("assistant", ""), ("tool", "act 1"), ("assistant", "done"), ("user", "second"),
    ]  # fmt: skip


def test_a_message_joins_between_two_steps(harness: Harness, bench: Bench) -> None:
    """A message that steers follows the results of the round. No call runs again."""
    bench.equip(Tool("look", "pure"), Tool(waits=True))
    harness.script(calls(("look", {}), ("act", {"amount": 1})), calls(("look", {"amount": 2})), says("done"))
    session_id = harness.send("first").session_id
    worker = threading.Thread(target=harness.run, args=(session_id,), daemon=True)
    worker.start()
    assert bench.entered.wait(PATIENCE_S)
    second = harness.send("second", on_busy="steer")
    bench.gate.set()
    worker.join(PATIENCE_S)
    told = [(message.role, message.content) for message in spoken(harness.model.requests[1])]
    assert told == [("user", "first"), ("assistant", ""), ("tool", "look 0"), ("tool", "act 1"), ("user", "second")]
    told = [(message.role, message.content) for message in spoken(harness.model.requests[2])[3:]]
    assert told == [("tool", "act 1"), ("user", "second"), ("assistant", ""), ("tool", "look 2")]
    assert harness.turn(second.turn_id)["reply"]["text"] == "done"
    assert bench.counts == {"look": 2, "act": 1}
    harness.script(says("again"))
    harness.ask("third")
    told = [(message.role, message.content) for message in spoken(harness.model.requests[3])[3:]]
    assert told == [
        ("tool", "act 1"), ("user", "second"), ("assistant", ""), ("tool", "look 2"), ("assistant", "done"),
        ("user", "third"),
    ]  # fmt: skip


def test_hooks_around_a_call(harness: Harness, bench: Bench, kind: str) -> None:
    """A hook sees the call's id, its arguments and its result; a required one that raises takes the call's place."""
    seen: list[Any] = []

    def at_most_1(call: ToolCalling) -> None:
        seen.append((call.tool, call.effect_id, dict(call.arguments)))
        if call.arguments["amount"] > 1:
            raise GuardRejected("At most 1.")

    def secret(called: ToolCalled) -> None:
        seen.append(called.result)
        if called.call.tool == "look":
            raise LookupError

    bench.equip(Tool("look"), Tool("act"), before_tool=[required(at_most_1)], after_tool=[required(secret)])
    harness.script(
        calls(("act", {"amount": 1})), calls(("act", {"amount": 2})), calls(("look", {"amount": 0})), says("done")
    )
    harness.ask()
    shown = "Error: {}" if kind == "native" else '{{"error":"{}"}}'  # as pydantic-ai shows a failed call
    refusals = ("At most 1.", "A guard of this installation refused this.")
    assert harness.results() == ["act 1", *map(shown.format, refusals)]
    assert _statuses(harness) == ["done", "failed", "failed"]
    assert bench.counts == {"act": 1, "look": 1}
    ids = [row.effect_id for row in harness.sql("SELECT effect_id FROM tool_effects ORDER BY message_seq")]
    assert seen == [
        ("act", ids[0], {"amount": 1}), "act 1", ("act", ids[1], {"amount": 2}),
        ("look", ids[2], {"amount": 0}), "look 0",
    ]  # fmt: skip


def test_a_long_result_is_cut(harness: Harness, bench: Bench) -> None:
    """The model, and the transcript, have as much of it as a prompt has room for."""
    long = "x" * (MAX_RESULT_CHARS + 1)
    bench.equip(Tool(result=long))
    harness.script(*ONE)
    harness.ask()
    assert harness.results() == [cut(long, MAX_RESULT_CHARS)]
    assert harness.model.requests[-1].messages[-1].content == cut(long, MAX_RESULT_CHARS)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_prompt_that_is_too_long_is_halved(harness: Harness, bench: Bench, is_last: bool) -> None:
    """The model is called again without a part of the history; if nothing is left out, the turn fails.

    The refused size is kept for the model if it accepted the smaller prompt.
    """
    bench.equip(Tool(), casebank=False)
    for number in range(0 if is_last else 4):
        harness.script(says(f"answer {number}"))
        harness.ask("x" * 4_000)
    before = len(harness.model.requests)
    harness.script(ContextTooLong("It is too long."), says("short"))
    turn = harness.ask("y" * 4_000)
    asked = harness.model.requests[before:]
    if is_last:
        assert (turn["error"]["code"], len(asked)) == ("CONTEXT_TOO_LONG", 1)
    else:
        assert turn["reply"]["text"] == "short"
        assert 2 <= len(asked[1].messages) < len(asked[0].messages)
    sizes = [row.tokens for row in harness.sql("SELECT tokens FROM model_windows")]
    assert sizes == ([] if is_last else [size_of_request(asked[0])])


Boundary = tuple[Literal["before", "after"], str, int]


COMMITS = {"turns.claim": 1, "turns.step": 2, "turns.finish_effect": 2, "turns.settle": 1}
"""The commits of an undisturbed turn with two calls in one reply, with the number of times that each occurs."""

BOUNDARIES: list[Boundary] = [
    (moment, name, nth)
    for name, count in COMMITS.items()
    for nth in range(1, count + 1)
    for moment in ("before", "after")
]

CRASHES = [
    (kind, each)
    for kind in KINDS
    for each in BOUNDARIES
    # A native tool's thread commits its result, and no exception ends it: see tests/processes.
    if (kind, each[1]) != ("native", "turns.finish_effect")
]


def test_the_enumeration_is_complete(harness: Harness, bench: Bench) -> None:
    """`BOUNDARIES` lists the commits of an undisturbed turn."""
    bench.equip(Tool("look", "pure"), Tool("act"))
    harness.script(calls(("look", {}), ("act", {})), says("done"))
    sent, seen = harness.send(), []
    with harness.hooked(lambda moment, name: seen.append((moment, name))):
        harness.run(sent.session_id)
    expected = sorted((moment, name) for moment, name, _ in BOUNDARIES)
    assert sorted(each for each in seen if each in set(expected)) == expected
    reads = {"context.past", "turns.history", "turns.first_read"}
    assert {name for _, name in seen} - {name for _, name in expected} <= reads


@pytest.mark.parametrize("effect", ["pure", "idempotent", "unsafe", "probed"])
@pytest.mark.parametrize(("kind", "boundary"), CRASHES, indirect=["kind"], ids=str)
def test_a_crash_at_every_commit(harness: Harness, bench: Bench, effect: str, boundary: Boundary) -> None:
    """Wherever the process dies, the message is answered once, and tools run as often as their effect classes allow."""

    def probe(context: Any) -> Happened | DidNotHappen:
        did = context.effect_id in {effect_id for name, effect_id in bench.ran if name == "act"}
        return Happened("act 2") if did else DidNotHappen()

    moment, name, nth = boundary
    declared = {"effect": "unsafe", "probe": probe} if effect == "probed" else {"effect": effect}
    bench.equip(Tool("look", "pure"), Tool("act", **declared))
    lines = [calls(("look", {"amount": 1}), ("act", {"amount": 2})), says("done")]
    harness.script(*lines)
    sent = harness.send()
    with harness.crashing(moment, name, nth):
        harness.run(sent.session_id)
    _again(harness, sent.session_id, lines)
    turn = harness.turn(sent.turn_id)
    assert (turn["status"], turn["reply"]["text"]) == ("done", "done")
    [looked, done] = harness.results()
    ids = [effect_id for ran, effect_id in bench.ran if ran == "act"]
    assert looked == "look 1"
    assert len(set(ids)) <= 1, "a repeated call keeps its id"
    match effect:
        case "pure" | "idempotent":
            assert (done, bool(ids)) == ("act 2", True)
        case "probed":
            assert (done, len(ids)) == ("act 2", 1)
        case _:
            assert len(ids) <= 1
            assert done == UNKNOWN_OUTCOME or (done == "act 2" and ids)


POINTS = [("before", 1), ("after", 1), ("before", 2), ("after", 2)]
RUNS = {"pure": [1, 1, 2, 1], "idempotent": [1, 1, 2, 1], "unsafe": [1, 0, 1, 1]}


@pytest.mark.parametrize("effect", RUNS)
@pytest.mark.parametrize("point", range(4))
def test_a_call_in_doubt(harness: Harness, bench: Bench, effect: str, point: int) -> None:
    """The effect class decides whether a call in doubt runs again."""
    bench.equip(Tool("act", effect))
    harness.script(*ONE)
    sent = harness.send()
    with harness.crashing(POINTS[point][0], "turns.step", POINTS[point][1]):  # type: ignore[arg-type]
        harness.run(sent.session_id)
    _again(harness, sent.session_id, ONE)
    assert len(bench.ran) == RUNS[effect][point]
    in_doubt = effect == "unsafe" and point in {1, 2}
    assert harness.results() == [UNKNOWN_OUTCOME if in_doubt else "act 1"]
    assert _statuses(harness) == ["unknown" if in_doubt else "done"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Happened("it did"), ("it did", "done", 0)),
        (DidNotHappen(), ("act 1", "done", 1)),
        (Unknown(), (UNKNOWN_OUTCOME, "unknown", 0)),
    ],
)
def test_a_probe_decides_about_an_unsafe_call(
    harness: Harness, bench: Bench, answer: Any, expected: tuple[str, str, int]
) -> None:
    """An unsafe call in doubt is repeated only if its probe says that nothing happened."""
    bench.equip(Tool(probe=lambda _: answer))
    harness.script(*ONE)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    _again(harness, sent.session_id, ONE)
    assert (*harness.results(), *_statuses(harness), len(bench.ran)) == expected


def test_a_call_in_doubt_is_not_decided_while_its_tool_may_still_run(harness: Harness, bench: Bench) -> None:
    """A second worker waits for the tool's time limit, and the wait ends when the turn is interrupted."""
    harness.set(lease_s=5, heartbeat_s=1)
    bench.equip(Tool("act", "pure"))
    harness.script(*ONE)
    sent = harness.send()
    with harness.crashing("after", "turns.step"):
        harness.run(sent.session_id)
    harness.move(6)
    runner = Runner(harness.runtime, "second")
    second = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    second.start()
    until(lambda: runner.keeper.running and harness.session(sent.session_id).token == 2, "the second runner has it")
    cancel(harness.runtime, sent.turn_id)
    runner.keeper.beat()
    second.join(PATIENCE_S)
    assert not second.is_alive()
    assert (bench.ran, harness.results()) == ([], [UNKNOWN_OUTCOME])


def _waiting(harness: Harness, bench: Bench, **given: Any) -> dict[str, Any]:
    bench.equip(Tool("pay", requires_approval=True), Tool("look", "pure"), **given)
    harness.script(calls(("pay", {"amount": 5})), says("done"))
    turn = harness.ask()
    assert turn["status"] == "waiting_approval"
    return turn


def _decide(harness: Harness, turn: dict[str, Any], call_id: str, decision: str, **given: Any) -> None:
    decide(harness.runtime, UUID(turn["turn_id"]), parse_decision({"call_id": call_id, "decision": decision, **given}))


def test_a_turn_that_waits_for_approval_holds_no_lease(harness: Harness, bench: Bench) -> None:
    """No worker waits. Each run below is a new runner, as after a restart."""
    turn = _waiting(harness, bench)
    [pending] = turn["pending_approvals"]
    assert (pending["call_id"], pending["tool"], pending["arguments"]) == ("call_0", "pay", {"amount": 5})
    row = harness.session(UUID(turn["session_id"]))
    assert (row.state, row.lease_until, row.strikes) == ("waiting_approval", None, 0)
    assert isinstance(harness.run(row.session_id), NotNeeded)
    assert bench.ran == []
    _decide(harness, turn, "call_0", "approve")
    assert harness.resume(turn)["status"] == "done"
    assert (bench.counts, harness.results(), _statuses(harness)) == ({"pay": 1}, ["pay 5"], ["done"])


def test_a_denied_call_does_not_run(harness: Harness, bench: Bench) -> None:
    """The model receives the denial."""
    turn = _waiting(harness, bench)
    _decide(harness, turn, "call_0", "deny")
    assert harness.resume(turn)["status"] == "done"
    assert (bench.ran, harness.results(), _statuses(harness)) == ([], [DENIED], ["denied"])


def test_a_person_may_edit_the_arguments(harness: Harness, bench: Bench) -> None:
    """The tool runs with the edited arguments."""
    turn = _waiting(harness, bench)
    _decide(harness, turn, "call_0", "approve", arguments={"amount": 7})
    assert harness.resume(turn)["status"] == "done"
    assert harness.results()[0].splitlines()[-1] == "pay 7"


def test_an_approval_that_does_not_come_in_time(harness: Harness, bench: Bench) -> None:
    """An expired approval denies the call."""
    turn = _waiting(harness, bench)
    harness.move(harness.settings.approval.expires_s + 1)
    assert harness.resume(turn)["status"] == "done"
    assert (bench.ran, harness.results()) == ([], [EXPIRED])


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_crash_after_an_approval(
    harness: Harness, bench: Bench, moment: Literal["before", "after"], nth: int
) -> None:
    """An approved unsafe call whose worker dies is in doubt like any other, and is not asked for again."""
    turn = _waiting(harness, bench)
    _decide(harness, turn, "call_0", "approve")
    name = "turns.begin_approved" if nth == 1 else "turns.step"
    with harness.crashing(moment, name):
        harness.run(UUID(turn["session_id"]))
    harness.script(says("done"))
    harness.move(DECIDED_S)
    assert harness.resume(turn)["status"] == "done"
    begun = {("before", 1): 1, ("after", 1): 0, ("before", 2): 1, ("after", 2): 1}[moment, nth]
    assert bench.counts.get("pay", 0) == begun
    known = (moment, nth) in {("before", 1), ("after", 2)}
    assert harness.results() == ["pay 5" if known else UNKNOWN_OUTCOME]


def test_a_cancelled_turn_that_waits(harness: Harness, bench: Bench) -> None:
    """Cancelling closes the call that waits."""
    turn = _waiting(harness, bench)
    cancel(harness.runtime, UUID(turn["turn_id"]))
    assert harness.turn(UUID(turn["turn_id"]))["status"] == "cancelled"
    assert _statuses(harness) == ["denied"]


def test_a_turn_is_cancelled_while_its_tool_runs(harness: Harness, bench: Bench) -> None:
    """The turn is settled; the outcome of the running call is unknown."""
    harness.set(heartbeat_s=1)
    bench.equip(Tool(waits=True))
    harness.script(*ONE)
    sent = harness.send()
    runner = Runner(harness.runtime, "first")
    first = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    first.start()
    assert bench.entered.wait(PATIENCE_S)
    cancel(harness.runtime, sent.turn_id)
    runner.keeper.beat()
    bench.gate.set()
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert harness.turn(sent.turn_id)["status"] == "cancelled"
    assert len(harness.model.requests) == 1


def test_a_turn_is_cancelled_while_its_model_answers(harness: Harness, bench: Bench) -> None:
    """The model call is aborted."""
    bench.equip(Tool())
    asked = threading.Event()

    def answer(_: ModelRequest, call: ModelCall) -> ModelReply:
        ended = threading.Event()
        with call.aborting(ended.set):
            asked.set()
            ended.wait(PATIENCE_S)
        return says("too late")

    harness.script(answer)
    sent = harness.send()
    runner = Runner(harness.runtime, "first")
    first = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    first.start()
    assert asked.wait(PATIENCE_S)
    cancel(harness.runtime, sent.turn_id)
    runner.keeper.beat()
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert harness.turn(sent.turn_id)["status"] == "cancelled"


def test_a_draining_worker_finishes_the_tools_and_parks_the_turn(harness: Harness, bench: Bench) -> None:
    """The next worker continues after the results."""
    bench.equip(Tool(waits=True))
    harness.script(*ONE)
    sent = harness.send()
    runner = Runner(harness.runtime, "draining")
    first = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    first.start()
    assert bench.entered.wait(PATIENCE_S)
    runner.keeper.begin_shutdown()
    bench.gate.set()
    first.join(PATIENCE_S)
    assert harness.turn(sent.turn_id)["status"] == "parked"
    assert harness.results() == ["act 1"]
    harness.script(says("done"))
    assert harness.run(sent.session_id) == Ran(1)
    assert bench.counts == {"act": 1}


def test_a_worker_that_lost_its_lease_writes_nothing(harness: Harness, bench: Bench) -> None:
    """A second worker takes over while the first one's tool runs. The first one's result does not enter the rows."""
    bench.equip(Tool(waits=True))
    harness.script(*ONE)
    sent = harness.send()
    runner = Runner(harness.runtime, "first")
    first = threading.Thread(target=runner.run, args=(sent.session_id,), daemon=True)
    first.start()
    assert bench.entered.wait(PATIENCE_S)
    harness.sql("UPDATE sessions SET lease_until = perdure_now() - interval '1 s'")
    harness.claimed(sent.session_id)
    runner.keeper.beat()
    bench.gate.set()
    first.join(PATIENCE_S)
    assert not first.is_alive()
    assert (harness.results(), len(harness.model.requests)) == ([], 1)
    harness.script(says("done"))
    harness.move(DECIDED_S)
    assert harness.run(sent.session_id, alone=True) == Ran(1)
    assert (harness.results(), bench.counts) == ([UNKNOWN_OUTCOME], {"act": 1})
    assert harness.turn(sent.turn_id)["status"] == "done"


def test_a_tool_that_hangs(harness: Harness, bench: Bench) -> None:
    """An unsafe tool that exceeds its time limit is not repeated, and its outcome is unknown."""
    bench.equip(Tool(waits=True, timeout_s=0.2))
    harness.script(*ONE)
    stopped = threading.Event()

    def pass_time() -> None:
        while not stopped.wait(0.05):
            harness.move(0.05)

    threading.Thread(target=pass_time, daemon=True).start()
    turn = harness.ask()
    stopped.set()
    assert (turn["status"], harness.results(), bench.counts) == ("done", [UNKNOWN_OUTCOME], {"act": 1})


def test_a_reply_that_was_cut_off_runs_no_call(harness: Harness, bench: Bench) -> None:
    """Its calls are closed, and the model is asked again."""
    bench.equip(Tool())
    harness.script(replace(calls(("act", {"amount": 1})), stop_reason="length"), says("sorry"))
    turn = harness.ask()
    assert (turn["status"], turn["reply"]["text"], bench.ran) == ("done", "sorry", [])
    [closed] = harness.results()
    assert closed.startswith("Error: Not run: the reply was cut off")


def test_a_model_that_never_ends(harness: Harness, bench: Bench) -> None:
    """The number of steps is limited."""
    bench.equip(Tool("act", "pure"), max_steps=3)
    harness.script(*[calls(("act", {})) for _ in range(5)])
    turn = harness.ask()
    assert (turn["status"], turn["error"]["code"], turn["steps"]) == ("failed", "BUDGET_EXHAUSTED", 3)


def test_text_is_streamed(harness: Harness, bench: Bench) -> None:
    """The pieces of a reply reach the turn's events before its commit."""
    seen: list[str] = []
    bench.equip()

    def answer(_: ModelRequest, call: ModelCall) -> ModelReply:
        call.delta("do")
        call.delta("ne")
        return says("done")

    class Events:
        def open(self, *place: Any) -> Any:
            class Opened:
                def __getattr__(self, name: str) -> Any:
                    return lambda *given, **_: seen.append(f"{name} {given[0] if given else ''}".strip())

            return Opened()

        def start(self) -> None: ...
        def close(self) -> None: ...

    harness.events = Events()  # type: ignore[assignment]
    harness.script(answer)
    assert harness.ask()["status"] == "done"
    assert seen[:3] == ["state running", "delta do", "delta ne"]


def test_an_erased_user_leaves_nothing(harness: Harness, bench: Bench) -> None:
    """Erasing removes the messages, what pydantic-ai stored with them, and the rows of the calls."""
    bench.equip(Tool("look", "pure"), Tool("act"))
    harness.script(calls(("look", {"amount": 41}), ("act", {"amount": 42})), says("a walnut"))
    harness.ask("walnut")
    eraser = replace(harness.runtime.eraser, redis_memory=None)
    eraser.erase(UserKey("ana"))
    assert harness.counts()["messages"] == harness.counts()["tool_effects"] == harness.counts()["turns"] == 0
