"""Runs turns of an agent in a test: the engine's step loop (`perdure.turns.run.loop`) on a store in memory.

This module replaces the engine's runner (`perdure.turns.run.loop.Runner`). It claims no lease, because no other
process can run the turn. When the turn is settled, this module appends the messages that no step has committed, such as
the reply, to the store. An exception that is not a `PerdureError` propagates to the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any, TypedDict, Unpack, assert_never
from uuid import UUID, uuid4

from perdure.access.tenants import user_key
from perdure.adapters.adopt import adopt
from perdure.agents import Agents
from perdure.clock import MovedClock
from perdure.database.failures import LEFT_OUT_CODES
from perdure.database.fencing import Fence
from perdure.errors import PerdureError, SettingsError
from perdure.files.parts import files_in, places, record
from perdure.files.store import take_in
from perdure.ids import new_id
from perdure.models.protocol import Message, Opaque, Role, ToolCall, Usage
from perdure.resilience.registry import Breakers
from perdure.runtime import Runtime
from perdure.settings import BudgetSettings, Settings
from perdure.snapshots.postgres import PostgresSnapshots
from perdure.testing.scripted import Scripted
from perdure.testing.store import Effect, MemoryFiles, MemoryStore
from perdure.testing.tasks import InlineCalls, Tasks
from perdure.text.untrusted import load_object, storable
from perdure.tools.awaited.port import TaskEnded
from perdure.tools.variables import VariableSet
from perdure.turns.calls import approvals
from perdure.turns.calls.awaited import finish
from perdure.turns.calls.children import value_of
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.tenure import Tenure, TurnRow
from perdure.turns.outcome import (
    AwaitsCalls,
    AwaitsDecision,
    AwaitsModel,
    Cancelled,
    Ending,
    Failed,
    HandedOver,
    Lacking,
    NotSaved,
    Outcome,
    Replied,
    ShutDown,
    Struck,
)
from perdure.turns.prompt.window import kept_turns, turns_read
from perdure.turns.run.loop import RunsItsTurns, turn_of
from perdure.turns.run.verdict import Verdict, conclude, render_error
from perdure.turns.transcript import Entry, Transcript

Approve = bool | Callable[[ToolCall], bool]
"""The decision about calls that need approval: one decision for all calls, or a function of the call."""


Answers = Sequence[Any] | Callable[[str], Any]
"""The user's answers to the questions of `ask_user` tools, in order, or a function of the question that the user reads.

A string is what the user writes; another value is the answer as JSON.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a turn, as the engine recorded it.

    Attributes:
        tool: The tool's name.
        arguments: The model's arguments by name, or the model's text if it is not a JSON object.
        status: `done`, `failed`, `denied` or `unknown`. While the turn waits: `asked`, `approved` or `intended`.
        result: The text that the model received; `None` while the call waits.
        effect_id: The call's id; `None` if the engine refused the call before the tool could run.
        approver: `user` or `staff` if the call needs approval, else `None`.
        answer: The turn in which another agent answers the call, if the tool is an `agent_tool`.
        progress: The tool's reports of its progress.

    Example:
        >>> def weather(city: str) -> str:
        ...     '''Say what the weather is like.'''
        ...     return f"Rain in {city}."
        >>> assistant = Agent("assistant", "You help.", tools=[weather])
        >>> made = ask(assistant, "Umbrella?", model=Scripted(call("weather", city="Paris"), "Yes.")).calls[0]
        >>> made.tool, made.arguments, made.result
        ('weather', {'city': 'Paris'}, 'Rain in Paris.')
    """

    tool: str
    arguments: Mapping[str, Any] | str
    status: str
    result: str | None
    effect_id: UUID | None = None
    approver: str | None = None
    answer: Answer | None = None
    progress: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a turn.

    Attributes:
        status: `done`, `failed`, `waiting_approval` or `parked`. A turn is `waiting_approval` if a call needs approval
            and the conversation's `approve` is `None`. A turn is `parked` if no model replies and the agent has
            `on_unavailable="park"`, or if the turn waits for a Celery task or an external
            tool that has no function in `tasks`, for another agent that waits itself, or for an answer
            that `answers` lacks.
        reply: The text that the user receives: the error's message if the turn failed, `None` while the turn waits.
        calls: The tool calls of this turn.
        transcript: The messages of this turn.
        steps: The number of the turn's steps so far.
        usage: The tokens that this turn has used; `None` if the model did not report any.
        working_variables: The session's working variables.
        error: The error that failed or parked the turn.
        data: The answer of an agent with an `output`, as a value of that type; of an agent of pydantic-ai, as JSON
            values.
        agent: The name of the agent that answered: another one after a `handoff`.
        question: The question to the user for which a parked turn waits, as the user reads it.

    Example:
        >>> answer = ask(Agent("assistant", "You help."), "Hello.", model=Scripted("Hi."))
        >>> answer.status, answer.reply, answer.steps
        ('done', 'Hi.', 1)
    """

    status: str
    reply: str | None
    calls: tuple[Call, ...]
    transcript: tuple[Message, ...]
    steps: int
    usage: Usage | None
    working_variables: Mapping[str, Any]
    error: PerdureError | None = None
    data: Any = None
    agent: str = ""
    question: str | None = None

    @property
    def error_code(self) -> str | None:
        """The code of the error that failed or parked the turn; `None` without an error."""
        return None if self.error is None else self.error.code


Given = Sequence[Mapping[str, Any]]
"""The parts of a message, as in `POST /v1/messages`."""


class Options(TypedDict, total=False):
    """Keyword arguments that `ask` passes to `Conversation`."""

    user_id: str
    tenant: str | None
    channel: str
    language: str | None
    metadata: Mapping[str, Any] | None
    working_variables: Mapping[str, Any] | None
    approve: Approve | None
    clock: MovedClock | None
    settings: Settings | None
    tasks: Tasks | None
    models: Mapping[str, Any] | None
    agents: Sequence[Any]
    answers: Answers


def ask(
    agent: Any, text: str = "", *, model: Any = None, parts: Given | None = None, **options: Unpack[Options]
) -> Answer:
    """Run one turn of `agent`, the first of a new `Conversation`; `agent` and `model` are those of a `Conversation`.

    `parts`, in place of `text`, are as in `POST /v1/messages`; a file has its content as `data`, in Base64.

    Raises:
        InvalidRequest: a file cannot be used.
        Exception: the model raised an error that is not a `PerdureError`, such as `ScriptExhausted`.

    Example:
        >>> ask(Agent("assistant", "You help."), "Hello.", model=Scripted("Hi.")).reply
        'Hi.'
    """
    return Conversation(agent, model=model, **options).ask(text, parts=parts)


class Conversation:
    """One session of one user with an agent. The session's turns run one after another.

    Args:
        agent: The agent that answers: of perdure, or of pydantic-ai.
        model: The model that the agent calls. An agent of pydantic-ai may also have a model of pydantic-ai, and needs
            none if it has a model of its own.
        user_id: The user's id.
        tenant: The user's tenant.
        channel: The channel of the user's messages.
        language: The language of error messages: the member `language` of the messages' metadata.
        metadata: The metadata of the messages.
        working_variables: The session's initial variables.
        approve: Decides about calls that need approval. If `approve` is `None`, a turn with such a call ends as
            `waiting_approval`.
        clock: The turns' clock. If a turn calls the tool `sleep_until`, this clock advances and the test does not wait.
            Defaults to the clock of a `Scripted` model, or to a new clock.
        settings: Default to perdure's defaults. The environment is not read.
        tasks: Functions that replace Celery tasks, by the task's name, and external tools, by the tool's name. A turn
            that waits for any other ends as `parked`.
        models: The models of other agents, which the agent asks or hands the conversation over to, by the agents'
            names. The others call `model`.
        agents: Other agents that tools of the agents refer to by name only.
        answers: The user's answers to questions of `ask_user` tools. Without a further answer, a turn that asks ends as
            `parked`.

    Example:
        >>> conversation = Conversation(Agent("assistant", "You help."), model=Scripted("Hi.", "I am well."))
        >>> [conversation.ask(text).reply for text in ("Hello.", "How are you?")]
        ['Hi.', 'I am well.']
    """

    def __init__(
        self,
        agent: Any,
        *,
        model: Any = None,
        user_id: str = "user",
        tenant: str | None = None,
        channel: str = "test",
        language: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        working_variables: Mapping[str, Any] | None = None,
        approve: Approve | None = None,
        clock: MovedClock | None = None,
        settings: Settings | None = None,
        tasks: Tasks | None = None,
        models: Mapping[str, Any] | None = None,
        agents: Sequence[Any] = (),
        answers: Answers = (),
    ) -> None:
        self._models, self._default_model = dict(models or {}), model
        first = adopt(agent)
        known = Agents([first, *(each for each in map(adopt, agents) if each.origin is not first.origin)])
        self._agents = {each.name: adopt(each, self._model_of(each.name)) for each in known}
        self._agent = self._agents[first.name]
        if self._model_of(first.name) is None and not isinstance(self._agent, RunsItsTurns):
            raise _lacks_model(self._agent.name)
        self._user = user_key(tenant, user_id)
        self._channel = channel
        self._metadata = {**(metadata or {}), **({} if language is None else {"language": language})}
        self._approve = approve
        self._clock = clock or (model.clock if isinstance(model, Scripted) else MovedClock())
        given = settings or Settings.model_construct()
        self._settings = given.model_copy(update={"budget": BudgetSettings()})  # no turns of other days are known
        self._user_id, self._tenant = user_id, tenant
        self._session_id = new_id(self._clock)
        self._store = MemoryStore()
        self._store.variables = dict(working_variables or {})
        self._store.agent = self._agent.name
        self._functions = tasks or {}
        self._tasks = self._make_calls(self._functions)
        self._children: dict[UUID, Answer] = {}
        """The answers of other agents, by the call's effect id."""
        self._user_answers = answers if callable(answers) else list(answers)
        self._runtime = self._make_runtime()
        vars(self._runtime)["files"] = MemoryFiles()
        self._turns = 0
        self._progress: dict[str, list[str]] = {}
        self._left_out: set[UUID] = set()
        self._open = False
        self._data: Any = None
        """The data of the last turn, as JSON values."""
        self._failures: set[int] = set()
        """The `seq` of each failed turn's reply, which no model receives."""

    def steer(self, text: str) -> None:
        """Send a message while a turn runs, as with `on_busy="steer"`. A tool, a hook or a model may call it.

        The message joins the turn after the calls of its reply. If the turn has no further step, the message is the
        next turn: `ask`, without a text, runs it.
        """
        row = {"message_id": str(new_id(self._clock)), "text": storable(text), "parts": None}
        self._store.steer({**row, "accepted_at": self._clock.now().isoformat()})

    def ask(self, text: str = "", *, parts: Given | None = None) -> Answer:
        """Run the session's next turn, on a message with this text or these `parts`.

        Raises:
            RuntimeError: the previous turn is not settled, or a message of `steer` waits.
            InvalidRequest: a file cannot be used.
            Exception: the model raised an error that is not a `PerdureError`, such as `ScriptExhausted`.
        """
        if self._open:
            raise RuntimeError("the previous turn is not settled: it waits for an approval or for a model")
        said, files = self._received(text, parts)
        self._open = True
        turn = self._next_turn()
        sent = Entry(
            turn.turn_id,
            Role.USER,
            storable(said),
            message_id=str(turn.turn_id),
            created_at=self._clock.now(),
            parts=files,
        )
        transcript = Transcript(turn.turn_id, [*self._window(), sent], self._store.running)
        began = self._clock.monotonic()
        while True:
            tenure = self._tenure(turn, self._clock.monotonic() - began)
            variables = VariableSet(self._store.variables)
            running = turn_of(self._runtime, tenure, self._agent, transcript, variables)
            tenure.report = self._note_progress
            outcome = running.run()
            if isinstance(outcome, HandedOver):
                self._agent = self._agents[self._store.agent]
                turn = replace(turn, agent=self._agent.name)
                self._store.instructions = None
                continue
            if isinstance(outcome, AwaitsCalls):
                self._store.record(outcome.results)
                asleep_since = self._clock.monotonic()
                if self._wait():
                    began += self._clock.monotonic() - asleep_since  # waiting does not count towards the time limit
                    continue
            if not isinstance(outcome, AwaitsDecision) or self._approve is None:
                break
            self._decide(transcript, self._approve)
        return self._answer(turn, transcript, outcome)

    def _note_progress(self, call_id: str, _tool: str, text: str) -> None:
        self._progress.setdefault(call_id, []).append(text)

    def _received(self, text: str, parts: Given | None) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """The text of a message, and the records of its files, which are stored. A message of `steer` comes first."""
        if self._store.steering:
            if text or parts is not None:
                raise RuntimeError("a message that joined no turn waits: ask(), without a text, answers it")
            return self._store.steering.pop(0)["text"], ()
        if parts is None:
            return text, ()
        message = Incoming.model_validate({"user": self._user, "parts": parts, **({"text": text} if text else {})})
        given = message.parts or ()
        files = files_in(given)
        stored = self._runtime.files
        rows = stored.rows(file_ids := take_in(stored, self._user, files))
        placed = zip(files, file_ids, places(given), strict=True)
        return message.text, tuple(record(part, rows[file_id], at) for part, file_id, at in placed)

    def _next_turn(self) -> TurnRow:
        self._turns += 1
        self._progress = {}
        self._store.instructions = None
        return TurnRow(
            turn_id=new_id(self._clock) if self._store.caller is None else self._session_id,
            session_id=self._session_id,
            seq=self._turns,
            user_id=self._user,
            agent=self._agent.name,
            channel=self._channel,
            first_seq=len(self._store.messages) + 1,
            cancel_requested_at=None,
            started_at=self._clock.now(),
            metadata=self._metadata,
        )

    def _window(self) -> list[Entry]:
        """The earlier messages in the prompt of a new turn: the messages of the last turns.

        As in the engine, some failed turns are left out.
        """
        seen = (each for each in self._store.messages if each["seq"] > self._store.running.to_seq)
        told = [each for each in seen if each["turn_id"] not in self._left_out]
        turns = [list(messages) for _, messages in groupby(told, key=lambda each: each["turn_id"])]
        most = turns_read(kept_turns(self._settings.memory, self._agent))
        kept = turns[max(0, len(turns) - most + 1) :]
        return [_entry(message) for messages in kept for message in messages if message["seq"] not in self._failures]

    def _tenure(self, turn: TurnRow, spent_s: float) -> Tenure:
        fence, lease_s = Fence(1, uuid4()), self._settings.turn.lease_s
        tenure = Tenure(self._session_id, fence, self._clock, lease_s, turn=turn)
        tenure.overdue = True  # there is no other worker
        tenure.spent(spent_s)
        tenure.begin()
        return tenure

    def _wait(self) -> bool:
        """Run the tasks and external calls that the turn waits for. If it waits in `sleep_until`, advance the clock.

        If it waits in several, the clock advances to the first of their times.

        Returns False if the turn still waits because a task or an external tool has no function, or the user no answer.
        """
        asks = (effect for effect in self._store.waiting() if effect.waits_for == "user")
        answered = [effect for effect in asks if not self._tasks.has(effect.tool)][:1]
        if answered and not self._answer_question(answered[0]):
            return False
        timers = [effect for effect in self._store.waiting() if effect.waits_for == "timer"]
        sleeps = [timer for timer in timers if timer.undecided_s > 0]
        slept_s = min((timer.undecided_s for timer in sleeps), default=0.0)
        self._clock.advance(timedelta(seconds=slept_s))
        for timer in sleeps:
            timer.undecided_s -= slept_s
        for effect in self._store.waiting():
            if effect.waits_for in {"client", "user"} and self._tasks.has(effect.tool):
                ended_call = self._tasks.call(effect.tool, load_object(effect.arguments))
                finish(self._runtime, effect.effect_id, ended_call)
        for effect in self._store.waiting():
            if effect.waits_for == "agent" and effect.effect_id not in self._children:
                self._ask_other(effect)
        while (ended := self._tasks.run()) is not None:
            call, outcome = ended
            finish(self._runtime, call.effect_id, outcome, call.part)
        return bool(answered or sleeps) or all(effect.undecided_s <= 0 for effect in self._store.waiting())

    def _answer_question(self, effect: Effect) -> bool:
        """Answer a question of the turn; returns False if the user has no answer."""
        if callable(self._user_answers):
            said = self._user_answers(_question(effect))
        elif self._user_answers:
            said = self._user_answers.pop(0)
        else:
            return False
        self._store.answer(effect, {"text": said} if isinstance(said, str) else {"value": said})
        return True

    def _ask_other(self, effect: Effect) -> None:
        """Run the turn in which another agent answers a call, and record its answer, unless the turn waits."""
        asked = self._store.asked[effect.effect_id]
        other = Conversation(
            self._agents[asked.agent],
            model=self._model_of(asked.agent),
            user_id=self._user_id,
            tenant=self._tenant,
            channel=self._channel,
            metadata=self._metadata,
            approve=self._approve,
            clock=self._clock,
            settings=self._settings,
            tasks=self._functions,
            models=self._models,
            agents=list(self._agents.values()),
        )
        other._user_answers = self._user_answers
        other._session_id = effect.effect_id
        other._store.caller = (self._store, asked.turn_id)
        self._store.children.append((asked.turn_id, other._store))
        self._children[effect.effect_id] = answer = other.ask(asked.task)
        effect.used = None if answer.usage is None else answer.usage.to_dict()
        if answer.status in {"done", "failed"}:
            failed = answer.status == "failed"
            value = answer.reply if failed else value_of(answer.reply, other._data)
            finish(self._runtime, effect.effect_id, TaskEnded(failed=failed, value=value))

    def _model_of(self, name: str) -> Any:
        return self._models.get(name, self._default_model)

    def _called_model(self) -> Any:
        found = self._model_of(self._agent.name)
        if found is None:  # an agent of pydantic-ai without a model, or another agent
            raise _lacks_model(self._agent.name)
        return found

    def _decide(self, transcript: Transcript, approve: Approve) -> None:
        open_reply = transcript.open_reply()
        if open_reply is None:
            raise LookupError("no call waits for a decision")
        for effect in self._store.awaiting_decision():
            call = open_reply.tool_calls[effect.position]
            approved = approve(call) if callable(approve) else approve
            self._store.decide(effect, approved=approved, denial=approvals.DENIED)

    def _answer(self, turn: TurnRow, transcript: Transcript, outcome: Outcome) -> Answer:
        match outcome:
            case AwaitsDecision():
                return self._read(transcript, "waiting_approval")
            case AwaitsCalls():
                return self._read(transcript, "parked")
            case AwaitsModel(error):
                return self._read(transcript, "parked", error)
            case Replied() | Failed() | Cancelled():
                return self._settle(turn, transcript, outcome)
            case ShutDown() | Lacking() | Struck() | NotSaved() | HandedOver():
                raise RuntimeError("the turn was left to another worker, which does not exist in a test")
            case _:
                assert_never(outcome)

    def _settle(self, turn: TurnRow, transcript: Transcript, ending: Ending) -> Answer:
        ending = render_error(self._runtime.agents, turn, ending)
        verdict = conclude(self._store, turn, transcript, ending, screens=self._agent.screens)
        self._store.append(turn.turn_id, verdict.messages)
        self._store.close_calls()
        if isinstance(ending, Failed):
            self._failures.add(len(self._store.messages))
        if verdict.variables is not None:
            self._store.variables = verdict.variables
        self._open = False
        if verdict.error_code in LEFT_OUT_CODES:
            self._left_out.add(turn.turn_id)
        self._data = verdict.data
        settled = Transcript(turn.turn_id, map(_entry, self._store.messages))
        error = ending.error if isinstance(ending, Failed) else None
        return self._read(settled, verdict.status, error, verdict)

    def _read(
        self, transcript: Transcript, status: str, error: PerdureError | None = None, verdict: Verdict | None = None
    ) -> Answer:
        present = transcript.present
        return Answer(
            status=status,
            reply=present[-1].content if status in {"done", "failed"} else None,
            calls=tuple(self._calls(present)),
            transcript=tuple(entry.message for entry in present),
            steps=transcript.steps if verdict is None else verdict.steps,
            usage=transcript.usage if verdict is None else verdict.used,
            working_variables=self._store.variables,
            error=error,
            data=None if verdict is None else self._output(verdict.data),
            agent=self._agent.name,
            question=next(self._questions(), None) if status == "parked" else None,
        )

    def _questions(self) -> Iterator[str]:
        """The questions without an answer: those of the turn itself, then those of the agents that it asked."""
        waiting = self._store.waiting()
        yield from (_question(each) for each in waiting if each.waits_for == "user")
        asked = (self._children.get(each.effect_id) for each in waiting if each.waits_for == "agent")
        yield from (each.question for each in asked if each is not None and each.question is not None)

    def _output(self, data: Any) -> Any:
        output = self._agent.output_type
        return data if output is None or data is None else output.restore(data)

    def _calls(self, entries: Sequence[Entry]) -> Iterator[Call]:
        results = {entry.tool_call_id: entry.content for entry in entries if entry.role is Role.TOOL}
        effects = {(each.message_seq, each.position): each for each in self._store.effects.values()}
        for entry in entries:
            for position, call in enumerate(entry.tool_calls):
                effect = effects.get((entry.seq or 0, position))
                if effect is None and isinstance(self._agent, RunsItsTurns):
                    continue  # a call of an output tool
                status = effect.status if effect else "failed"
                effect_id = effect.effect_id if effect else None
                approver = effect.approver if effect else None
                answer = self._children.get(effect_id) if effect_id else None
                reports = tuple(self._progress.get(call.id, ()))
                yield Call(
                    call.name, _arguments(call), status, results.get(call.id), effect_id, approver, answer, reports
                )

    def _make_calls(self, tasks: Tasks) -> InlineCalls:
        return InlineCalls(tasks)

    def _make_runtime(self) -> Runtime:
        return Runtime(
            self._settings,
            self._clock,
            self._store,
            Agents([self._agent, *(each for each in self._agents.values() if each is not self._agent)]),
            lambda _: self._called_model(),
            _NoWorkers(),
            PostgresSnapshots(self._store),
            breakers=Breakers(self._settings.breaker, self._clock),
            calls=self._tasks,
        )


def _lacks_model(agent: str) -> SettingsError:
    return SettingsError(f"agent {agent!r} needs a model, such as Scripted(…)")


class _NoWorkers:
    """A `Waker` that publishes nothing, because there are no workers to wake."""

    def _not_sent(self, *_: object, **__: object) -> bool:
        return False

    session = drain = has_enough = delivery = ending = consolidation = casebank = _not_sent


def _question(effect: Effect) -> str:
    problem = (effect.payload or {}).get("problem")
    return "\n".join(each for each in (problem, load_object(effect.arguments)["question"]) if each)


def _arguments(call: ToolCall) -> Mapping[str, Any] | str:
    try:
        return load_object(call.arguments)
    except ValueError:
        return call.arguments


def _entry(message: Mapping[str, Any]) -> Entry:
    return Entry(
        message["turn_id"],
        Role(message["role"]),
        message["content"],
        tuple(ToolCall.from_dict(call) for call in message["tool_calls"] or ()),
        message["tool_call_id"],
        message_id=message["message_id"],
        model=message["model"],
        fallback=message["fallback"],
        usage=Usage.from_dict(message["usage"]) if message["usage"] else None,
        seq=message["seq"],
        stop_reason=message["stop_reason"],
        opaque=Opaque.from_dict(message["opaque"]) if message["opaque"] else None,
        parts=tuple(message["parts"] or ()),
    )
