"""A client's stream is complete, in order, resumable from any position, and without withdrawn text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis
from pydantic_ai import Agent as PydanticAgent

from perdure import (
    Agent,
    Allow,
    Replace,
    TurnContext,
    TurnStarted,
    Verdict,
    adapt,
    agent_tool,
    ask_user,
    celery_tool,
    guard,
    progress,
    required,
)
from perdure.access.tenants import UserKey
from perdure.agents import Agents
from perdure.errors import GuardRejected, NotFound, ProviderError, RateLimited
from perdure.events.event import Event, EventId, EventKind
from perdure.models.protocol import ModelReply, ToolCall
from perdure.redis import client_url
from perdure.tools.awaited.port import TaskEnded, TaskRuns
from perdure.tools.progress import MAX_CHARS
from perdure.tools.registry import ToolContext, tool
from perdure.turns.calls.approvals import decide, parse_decision
from perdure.turns.calls.awaited import finish, probe_due
from perdure.turns.cancel import cancel
from perdure.turns.reading import read_turn
from tests.streams.conftest import PATIENCE_S, Client, Streaming, Watching, run
from tests.turns.broker import Broker


def test_text_arrives_while_the_model_streams(streaming: Streaming) -> None:
    """The client receives deltas before the reply is committed. The committed message has the same text."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            streaming.model.type("It is ", "sunny")
            await client.follow(events, lambda each: each.shown == "It is sunny")
            streaming.model.reply("It is sunny")
            await client.follow(events)

    run(main())
    assert client.committed == ["hello", "It is sunny"]
    assert client.done is not None
    assert client.done["status"] == "done"
    assert client.kinds[-1] == EventKind.DONE
    assert EventKind.REWIND not in client.kinds


def test_hundreds_of_clients_read_the_events_of_a_turn_at_once(
    streaming: Streaming, caplog: pytest.LogCaptureFixture
) -> None:
    """One event wakes them all. The gateway reads for some of them at a time, and for each without an error."""
    clients = [Client() for _ in range(250)]

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            streaming.model.type("one ")
            first = [each.follow(gateway.events(turn_id), lambda one: one.shown == "one ") for each in clients]
            await asyncio.gather(*first)
            streaming.model.reply("one two")

    run(main())
    assert [record.message for record in caplog.records if "cannot be read" in record.message] == []


def test_a_late_listener_receives_the_text_so_far(streaming: Streaming) -> None:
    """A client that connects during a step receives the step's text from its beginning."""
    client = Client()

    async def main() -> None:
        turn_id = streaming.ask()
        streaming.model.type("Once upon ", "a time ")
        async with streaming.hub() as gateway:
            events = gateway.events(turn_id)
            await client.follow(events, lambda each: each.shown == "Once upon a time ")
            streaming.model.type("there was")
            await client.follow(events, lambda each: each.shown == "Once upon a time there was")
            streaming.model.reply("Once upon a time there was one.")
            await client.follow(events)

    run(main())
    assert client.committed[-1] == "Once upon a time there was one."


def test_without_a_listener_nothing_is_written(streaming: Streaming, redis_url: str) -> None:
    """If no client follows a turn, the worker writes no stream to Redis."""
    turn_id = streaming.ask()
    streaming.model.type("Nobody reads this.")
    streaming.model.reply("Nobody reads this.")
    for worker in streaming.workers:
        worker.join(20)
    with redis.Redis.from_url(client_url(redis_url)) as client:
        assert [key for key in client.keys("*") if str(turn_id).encode() in key] == []


def test_a_client_resumes_after_its_last_event(streaming: Streaming) -> None:
    """A resumed stream continues after the client's last event, and nothing is sent twice."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            streaming.model.type("one ")
            await client.follow(gateway.events(turn_id), lambda each: each.shown == "one ")
        streaming.model.type("two ")
        async with streaming.hub() as gateway:  # another gateway
            events = gateway.events(turn_id, client.last)
            await client.follow(events, lambda each: each.shown == "one two ")
            streaming.model.reply("one two three")
            await client.follow(events)
            assert client.last is not None
            assert [event async for event in gateway.events(turn_id, client.last)] == []

    run(main())
    assert client.committed == ["hello", "one two three"]
    assert EventKind.REWIND not in client.kinds


def test_after_a_flush_of_redis_a_client_begins_the_step_again(streaming: Streaming, redis_url: str) -> None:
    """If Redis has lost the client's position, the client gets a `rewind`, and later the committed text."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            streaming.model.type("lost ")
            await client.follow(gateway.events(turn_id), lambda each: each.shown == "lost ")
            with redis.Redis.from_url(client_url(redis_url)) as admin:
                admin.flushall()
            events = gateway.events(turn_id, client.last)
            await client.follow(events, lambda each: each.kinds[-1] == EventKind.REWIND)
            streaming.model.type("words")
            streaming.model.reply("lost words")
            await client.follow(events)

    run(main())
    assert client.committed == ["hello", "lost words"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_after_a_loss_in_the_stream_no_text_follows_the_lost_text(
    streaming: Streaming, redis_url: str, lost: int
) -> None:
    """Redis has lost the text before the client's position, in the middle, or at it. Then another worker streams."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            for number, piece in enumerate(("one ", "two ", "three "), start=1):
                streaming.model.type(piece)
                await client.follow(events, lambda each, number=number: len(each.shown.split()) == number)  # type: ignore[misc]
            with redis.Redis.from_url(client_url(redis_url)) as admin:
                [key] = [each for each in admin.keys("*") if each.endswith(str(turn_id).encode())]
                pieces = [each for each, fields in admin.xrange(key) if fields[b"kind"] == b"delta"]
                assert admin.xdel(key, pieces[lost]) == 1
            events = gateway.events(turn_id, client.last)
            writer = streaming.harness.events
            assert writer is not None
            [session] = streaming.harness.sql("SELECT session_id, token FROM sessions")
            successor = writer.open(turn_id, session.session_id, session.token + 1, 0)
            successor.delta("four ")
            await client.follow(events, lambda each: each.shown.endswith("four "))
            assert client.shown == "four "
            streaming.model.reply("four five")
            await client.follow(events)

    run(main())
    assert client.committed == ["hello", "four five"]


def test_a_follower_of_a_message_that_steers_follows_the_turn_that_it_joins(streaming: Streaming) -> None:
    """Followers of the turn see the message that joined it; those of the message see the turn that it joined."""
    clients = first, second = Client(), Client()

    @tool(effect="pure")
    def look() -> str:
        """Look."""
        return "seen"

    streaming.harness.agents = Agents([Agent("assistant", "You help.", [look])])
    streaming.runtime = streaming.harness.runtime

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            steers = streaming.send("and this", on_busy="steer")[0]
            events = [gateway.events(each) for each in (turn_id, steers)]
            await second.follow(events[1], lambda each: each.states != [])
            assert second.states == [{"status": "accepted"}]
            streaming.model.reply(ModelReply("", (ToolCall("1", "look", "{}"),), model="typist"))
            streaming.model.type("It is ")
            for client, each in zip(clients, events, strict=True):
                await client.follow(each, lambda each: each.shown == "It is ")
            streaming.model.reply("It is done")
            for client, each in zip(clients, events, strict=True):
                await client.follow(each)

    run(main())
    for client in clients:
        assert client.committed == ["hello", "", "seen", "and this", "It is done"]
        assert client.done is not None
        assert client.done["reply"]["text"] == "It is done"
    assert first.done == second.done


@pytest.mark.parametrize("kind", ["native", "async", "adapted"])
def test_the_progress_of_a_call_is_an_event(streaming: Streaming, kind: str) -> None:
    """A follower sees the last report of each batch, before the call has its result. A late one sees the last one."""
    entered, gate, seen = threading.Event(), threading.Event(), Client()

    def work() -> str:
        for number in range(1, 1_001):
            progress(f"{number} of 1000" + "." * 500)
        entered.set()
        assert gate.wait(PATIENCE_S)
        progress(Unprintable())
        return "counted"

    streaming.harness.agents = Agents([_counting(kind, work)])
    streaming.runtime = streaming.harness.runtime

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask("count")
            events = gateway.events(turn_id)
            streaming.model.reply(ModelReply("", (ToolCall("1", "count", "{}"),), model="typist"))
            assert await asyncio.to_thread(entered.wait, PATIENCE_S)
            await seen.follow(events, lambda each: each.progress[-1:] == [("1", "count", LAST)])
            late = Client()
            await late.follow(gateway.events(turn_id), lambda each: each.progress[-1:] == [("1", "count", LAST)])
            gate.set()
            streaming.model.reply("done")
            await seen.follow(events)

    run(main())
    assert len(seen.progress) < 100, "reports are coalesced"
    assert seen.done is not None
    assert seen.committed == ["count", "", "counted", "done"]


LAST = ("1000 of 1000" + "." * 500)[: MAX_CHARS - 1] + "…"


class Unprintable:
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


def _counting(kind: str, work: Callable[[], str]) -> Agent:
    """An agent with a tool `count` that does `work`."""

    def count() -> str:
        """Count."""
        return work()

    if kind == "adapted":
        bare = PydanticAgent(name="assistant", instructions="You help.")
        bare.tool_plain(count)
        return adapt(bare)

    async def counting(context: ToolContext) -> str:
        """Count."""
        del context
        return await asyncio.to_thread(work)

    found = tool(effect="pure", name="count")(counting) if kind == "async" else tool(effect="pure")(count)
    return Agent("assistant", "You help.", [found])


def test_a_tasks_progress_is_an_event_within_a_second(streaming: Streaming) -> None:
    """While a client follows the turn, workers probe its tasks twice a second, however old they are."""
    broker, client = Broker(), Client()
    streaming.harness.calls = broker
    streaming.harness.agents = Agents([Agent("assistant", "You help.", [celery_tool("export", timeout_s=3_600)])])
    streaming.runtime = runtime = streaming.harness.runtime

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask("export")
            events = gateway.events(turn_id)
            streaming.model.reply(ModelReply("", (ToolCall("1", "export", "{}"),), model="typist"))
            await client.follow(events, lambda each: each.states[-1:] != [] and each.states[-1]["status"] == "parked")
            streaming.harness.move(600)
            probe_due(runtime, cancel)  # an old task: its next probe would be a minute later
            broker.states[broker.sent[0].task_id] = TaskRuns("3 of 9")
            streaming.harness.move(0.6)
            await asyncio.to_thread(probe_due, runtime, cancel)
            async with asyncio.timeout(1):
                await client.follow(events, lambda each: each.progress != [])
            assert client.progress == [("1", "export", "3 of 9")]
            assert client.states[-1]["waiting_for"]["progress"] == client.progress[-1][2]

    run(main())


def test_a_withdrawn_answer_is_withdrawn_from_the_client(streaming: Streaming) -> None:
    """If a fallback model answers, a `rewind` withdraws the first model's text from the client."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            streaming.model.type("The capital is Lyo")
            await client.follow(events, lambda each: each.shown != "")
            streaming.model.withdraw()
            streaming.model.type("Paris.")
            await client.follow(events, lambda each: each.shown == "Paris.")
            streaming.model.reply("Paris.")
            await client.follow(events)

    run(main())
    assert client.kinds.count(EventKind.REWIND) == 1


def test_a_rejected_reply_is_withdrawn_from_the_client(streaming: Streaming) -> None:
    """If a required hook rejects a reply, a `rewind` withdraws the streamed text before the error's message arrives."""
    client = Client()

    def refuse(_: object) -> None:
        raise GuardRejected("Not with me.")

    streaming.runtime = replace(
        streaming.runtime, agents=Agents([Agent("assistant", "You help.", after_turn=[required(refuse)])])
    )

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            streaming.model.type("The password is")
            await client.follow(events, lambda each: each.shown != "")
            streaming.model.reply("The password is 1234.")
            await client.follow(events)

    run(main())
    assert client.kinds.count(EventKind.REWIND) == 1
    assert client.kinds[-5:] == [
        EventKind.REWIND, EventKind.MESSAGE, EventKind.MESSAGE, EventKind.ERROR, EventKind.DONE,
    ]  # fmt: skip
    assert client.committed == ["hello", "Not with me."]
    assert client.done is not None
    assert client.done["steps"] == 1


def _equip(streaming: Streaming, **given: Any) -> None:
    streaming.runtime = replace(streaming.runtime, agents=Agents([Agent("assistant", "You help.", **given)]))


def test_a_changed_reply_replaces_the_streamed_text(streaming: Streaming) -> None:
    """If a hook changes the reply, a `rewind` withdraws the streamed text before the message arrives."""
    client = Client()
    _equip(streaming, after_turn=[required(lambda ending: ending.replace(reply="I keep passwords secret."))])

    async def main() -> None:
        async with streaming.hub() as gateway:
            events = gateway.events(streaming.ask())
            streaming.model.type("The password is")
            await client.follow(events, lambda each: each.shown != "")
            streaming.model.reply("The password is 1234.")
            await client.follow(events)

    run(main())
    assert client.kinds.count(EventKind.REWIND) == 1
    assert client.committed == ["hello", "I keep passwords secret."]


def test_text_that_an_output_guard_judges_is_not_streamed(streaming: Streaming) -> None:
    """A client never sees text that the guard may refuse or replace."""
    client = Client()

    def redacted(text: str, turn: TurnContext) -> Verdict:
        return Replace("The password is secret.")

    _equip(streaming, output_guards=[redacted])

    async def main() -> None:
        async with streaming.hub() as gateway:
            events = gateway.events(streaming.ask())
            streaming.model.type("The password is 1234.")
            streaming.model.reply("The password is 1234.")
            await client.follow(events)

    run(main())
    assert EventKind.DELTA not in client.kinds
    assert client.committed == ["hello", "The password is secret."]


@pytest.mark.parametrize("changes", [False, True])
def test_text_is_held_until_the_parallel_guards_allow(streaming: Streaming, *, changes: bool) -> None:
    """After the verdict, the client gets the text so far, then each piece at once; and no text is withdrawn."""
    client, allowed = Client(), threading.Event()

    def waits(text: str, turn: TurnContext) -> Verdict:
        allowed.wait(10)
        return Allow()

    def changed(turn: TurnStarted) -> TurnStarted | None:
        return turn.replace(text="goodbye") if changes else None

    _equip(streaming, before_turn=[changed], input_guards=[guard(waits, parallel=True, timeout_s=10)])

    async def main() -> None:
        async with streaming.hub() as gateway:
            events = gateway.events(streaming.ask())
            streaming.model.type("It is ")
            await client.follow(events, lambda each: EventKind.STATE in each.kinds)
            assert EventKind.DELTA not in client.kinds
            allowed.set()
            if not changes:
                await client.follow(events, lambda each: each.shown == "It is ")
                streaming.model.type("sun")
                await client.follow(events, lambda each: each.shown == "It is sun")
            streaming.model.reply("It is sunny.")
            await client.follow(events)

    run(main())
    assert EventKind.REWIND not in client.kinds
    assert client.committed == ["goodbye" if changes else "hello", "It is sunny."]


def test_another_worker_takes_over(streaming: Streaming) -> None:
    """If a second worker takes over a turn, a `rewind` withdraws the first worker's text."""
    client = Client()
    harness = streaming.harness

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id, session_id = streaming.send()
            lost = streaming.start(session_id)
            assert streaming.model.called.acquire(timeout=20)
            events = gateway.events(turn_id)
            streaming.model.type("The first worker says")
            await client.follow(events, lambda each: each.shown != "")
            harness.move(2 * harness.settings.turn.lease_s)
            streaming.start(session_id)
            assert streaming.model.called.acquire(timeout=20)
            streaming.model.type("one", "two")  # one piece for each worker, in any order
            streaming.model.reply("The second says.")
            streaming.model.reply("The second says.")
            await client.follow(events)
            lost.join(20)

    run(main())
    assert client.committed == ["hello", "The second says."]


def test_tool_calls_and_results_are_events(streaming: Streaming) -> None:
    """Each tool call and each result is sent once, as a separate event."""

    @tool(effect="pure")
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    streaming.harness.equip(add)
    streaming.runtime = streaming.harness.runtime
    seen: list[Event] = []

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            call = ToolCall("c1", "add", '{"a": 1, "b": 2}')
            streaming.model.reply(ModelReply("", (call,), model="typist"))
            streaming.model.reply("It is 3.")
            seen.extend([event async for event in gateway.events(turn_id) if event is not None])

    run(main())
    events = [(event.kind, event.data) for event in seen]
    assert events.count((EventKind.TOOL_CALL, {"id": "c1", "name": "add", "arguments": {"a": 1, "b": 2}})) == 1
    assert events.count((EventKind.TOOL_RESULT, {"id": "c1", "content": "3"})) == 1
    assert [data["role"] for kind, data in events if kind == EventKind.MESSAGE] == [
        "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_a_failed_turn_ends_with_its_error(streaming: Streaming) -> None:
    """`error` comes before `done`. A client that resumes after `error` receives only `done`."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            streaming.model.reply(ProviderError("The provider is out of order."))
            await client.follow(gateway.events(turn_id))
            assert client.kinds[-2:] == [EventKind.ERROR, EventKind.DONE]
            error_id = EventId(len(client.committed) + 1)
            rest = [event async for event in gateway.events(turn_id, error_id)]
            assert [event.kind for event in rest if event] == [EventKind.DONE]

    run(main())
    assert client.done is not None
    assert client.done["error"]["code"] == "PROVIDER_ERROR"


def test_a_turn_that_no_worker_runs_ends_its_stream_too(streaming: Streaming) -> None:
    """No worker announces a turn that is cancelled before it begins.

    The gateway finds the cancelled turn in PostgreSQL, and ends the turn's stream.
    """
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id, _ = streaming.send()
            events = gateway.events(turn_id)
            await client.follow(events, lambda each: each.kinds == [EventKind.STATE])
            cancel(streaming.runtime, turn_id)
            await client.follow(events)

    run(main())
    assert client.kinds == [EventKind.STATE, EventKind.ERROR, EventKind.DONE]


def test_a_position_ahead_of_the_turn_is_rewound(streaming: Streaming) -> None:
    """A client whose position is ahead of PostgreSQL, as after a failover, gets a `rewind`."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id, _ = streaming.send()
            events = gateway.events(turn_id, EventId(7, 3))
            await client.follow(events, lambda each: EventKind.STATE in each.kinds)
            assert client.kinds[0] == EventKind.REWIND
            cancel(streaming.runtime, turn_id)
            await client.follow(events)

    run(main())


def test_streams_beyond_the_limit_are_refused(streaming: Streaming) -> None:
    """`PERDURE_STREAM__MAX_OPEN` limits the open streams. After one is closed, another can be opened."""
    settings = streaming.harness.settings
    stream = settings.stream.model_copy(update={"max_open": 2})
    streaming.harness.settings = settings.model_copy(update={"stream": stream})
    streaming.runtime = streaming.harness.runtime

    async def opened(gateway: Watching, turn_id: Any) -> Any:
        events = gateway.events(turn_id)
        await anext(events)
        return events

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id, _ = streaming.send()
            first, _second = await opened(gateway, turn_id), await opened(gateway, turn_id)
            with pytest.raises(RateLimited, match="PERDURE_STREAM__MAX_OPEN"):
                await opened(gateway, turn_id)
            await first.aclose()
            await opened(gateway, turn_id)
            cancel(streaming.runtime, turn_id)

    run(main())


@pytest.mark.parametrize("piece", [chr(0xD83D), "a\x00b", chr(0xDC00), '"\\\n\r\u2028'])
def test_hostile_text_reaches_the_client_storable(streaming: Streaming, piece: str) -> None:
    """Lone surrogates, NUL and line ends in a model's text neither end the stream nor forge an event."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            streaming.model.type(piece, chr(0xDE00), "!")
            await client.follow(events, lambda each: each.shown.endswith("!"))
            streaming.model.reply("done")
            await client.follow(events)

    run(main())
    assert client.committed[-1] == "done"


def test_a_client_sees_what_a_parked_turn_waits_for(streaming: Streaming) -> None:
    """The turn's `state` events show the awaited task and its progress. The task's result follows as a message."""
    broker = Broker()
    streaming.harness.equip(celery_tool("reports.export", effect="idempotent"))
    streaming.runtime = replace(streaming.runtime, calls=broker, agents=streaming.harness.agents)
    client = Client()
    states = client.states

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            streaming.model.reply(ModelReply("", (ToolCall("call_0", "reports_export", "{}"),), model="typist"))
            await client.follow(events, lambda _: states[-1:] != [] and "waiting_for" in states[-1])
            task = broker.sent[0].task_id
            broker.states[task] = TaskRuns("half")
            streaming.harness.move(60)
            probe_due(streaming.runtime, cancel)
            await client.follow(events, lambda _: states[-1].get("waiting_for", {}).get("progress") == "half")
            finish(streaming.runtime, task, TaskEnded(failed=False, value="made"))
            streaming.start(streaming.harness.sql("SELECT session_id FROM sessions")[0].session_id)
            streaming.model.reply("Here it is.")
            await client.follow(events)

    run(main())
    assert states[0]["status"] in {"accepted", "running", "parked"}  # a slow client receives only the latest of these
    waits = [each["waiting_for"] for each in states if "waiting_for" in each]
    assert [(each["kind"], each["name"], each["progress"]) for each in waits] == [
        ("task", "reports_export", None), ("task", "reports_export", "half"),
    ]  # fmt: skip
    assert client.committed[-2:] == ["made", "Here it is."]


def test_a_client_sees_the_call_of_another_agent_and_none_of_its_words(streaming: Streaming) -> None:
    """The stream shows that the turn waits for the agent, and the answer as the call's result."""
    research = agent_tool(Agent("searcher", "You search."), name="research")
    streaming.harness.equip(research)
    streaming.runtime = replace(streaming.runtime, calls=Broker(), agents=streaming.harness.agents)
    client = Client()
    seen: list[str] = []

    def note(each: Client) -> bool:
        seen.append(each.shown)
        return False

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            asking = ToolCall("call_0", "research", '{"task": "Rome?"}')
            streaming.model.reply(ModelReply("", (asking,), model="typist"))
            await client.follow(events, lambda each: each.states[-1:] != [] and "waiting_for" in each.states[-1])
            child = streaming.harness.sql("SELECT session_id FROM sessions WHERE depth = 1")[0].session_id
            worker = streaming.start(child)
            streaming.model.type("I ", "search ", "aloud.")
            streaming.model.reply("753 BC.")
            worker.join(PATIENCE_S)
            streaming.start(streaming.harness.sql("SELECT session_id FROM sessions WHERE depth = 0")[0].session_id)
            streaming.model.reply("It is old.")
            await client.follow(events, note)

    run(main())
    waits = [each["waiting_for"] for each in client.states if "waiting_for" in each]
    assert {(each["kind"], each["name"]) for each in waits} == {("agent", "research")}
    assert client.committed[-2:] == ["753 BC.", "It is old."]
    assert not any("aloud" in shown for shown in seen)


def test_a_client_sees_what_another_agent_needs_from_a_person(streaming: Streaming) -> None:
    """Its question, the approval that its call needs, and the decision are events of the stream of the user's turn."""
    dig = tool(effect="pure", requires_approval=True, name="dig")(_dig)
    research = agent_tool(Agent("searcher", "You search.", [dig, ask_user()]), name="research")
    streaming.harness.equip(research)
    streaming.runtime = replace(streaming.runtime, calls=Broker(), agents=streaming.harness.agents)
    client, needed, decided = Client(), EventKind.APPROVAL_REQUIRED, EventKind.APPROVAL_DECIDED

    def asks(each: Client) -> bool:
        return "question" in each.states[-1].get("waiting_for", {})

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            events = gateway.events(turn_id)
            reply = partial(ModelReply, "", model="typist")
            streaming.model.reply(reply((ToolCall("call_0", "research", '{"task": "Rome?"}'),)))
            await client.follow(events, lambda each: each.states[-1:] != [] and "waiting_for" in each.states[-1])
            child = streaming.harness.sql("SELECT session_id FROM sessions WHERE depth = 1")[0].session_id
            streaming.start(child)
            streaming.model.reply(reply((ToolCall("call_0", "dig", "{}"),)))
            await client.follow(events, lambda each: needed in each.kinds)
            [approval] = read_turn(streaming.runtime.database, turn_id)["pending_approvals"]
            decide(streaming.runtime, turn_id, parse_decision({"call_id": approval["call_id"], "decision": "approve"}))
            streaming.start(child)
            streaming.model.reply(reply((ToolCall("call_0", "ask_user", '{"question": "Which Rome?"}'),)))
            await client.follow(events, lambda each: decided in each.kinds and asks(each))
            assert streaming.harness.send("Italy").turn_id == turn_id
            await client.follow(events, lambda each: not asks(each))

    run(main())
    assert client.states[-1]["waiting_for"]["kind"] == "agent"
    assert [client.kinds.count(each) for each in (needed, decided)] == [1, 1]


def _dig() -> str:
    """Dig."""
    return "sand"


def test_the_stream_of_an_erased_turn_ends(streaming: Streaming) -> None:
    """No worker settles an erased turn: its stream would stay open for ever, with one of the gateway's places."""
    client = Client()

    async def main() -> None:
        async with streaming.hub() as gateway:
            turn_id = streaming.ask()
            streaming.model.type("Secret ")
            events = gateway.events(turn_id)
            await client.follow(events, lambda each: each.shown == "Secret ")
            streaming.model.type("plans")
            await client.follow(events, lambda each: each.shown == "Secret plans")
            await gateway.threads.run(partial(streaming.runtime.eraser.erase, UserKey("ana")))
            with pytest.raises(NotFound):
                await client.follow(events)
        streaming.model.reply("Secret plans.")

    run(main())
    assert client.done is None


def test_a_hub_that_is_connecting_ends_with_its_event_loop(streaming: Streaming) -> None:
    """`asyncio.run` cancels the tasks that are left once, and waits for them: redis-py drops it while it connects."""

    async def begin_and_cancel(steps: int) -> int:
        async with streaming.hub():
            for _ in range(steps):
                await asyncio.sleep(0)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=2)
            return len(pending)

    assert {steps: found for steps in range(1, 40) if (found := asyncio.run(begin_and_cancel(steps)))} == {}
