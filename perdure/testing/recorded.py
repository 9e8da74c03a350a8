"""Replays a recorded turn against an agent, and says what is different.

A recording is a bundle that `perdure turns export TURN_ID` prints, or `perdure sessions export SESSION_ID` for the
turns of a conversation (`perdure.turns.recording`). A replay runs the step loop of the engine in memory, as
`perdure.testing.ask` does. The prompts quote the recorded memories and cases. The recorded results answer the calls of
tools, and the recorded decisions those of approvals. Without a model, the recorded replies answer, so a replay of an
unchanged agent has no difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeGuard
from uuid import UUID

from perdure.adapters.adopt import adopt
from perdure.agents import Agent
from perdure.clock import MovedClock, SystemClock
from perdure.errors import PerdureError, SettingsError
from perdure.models.protocol import Model, ModelCall, ModelReply, ModelRequest, Role, ToolCall, Usage
from perdure.models.resolve import Models
from perdure.runtime import Runtime
from perdure.settings import Settings
from perdure.testing.conversation import Answer, Conversation, Given
from perdure.testing.scripted import ScriptExhausted
from perdure.testing.store import Effect
from perdure.testing.tasks import InlineCalls, Tasks
from perdure.text.untrusted import load_object
from perdure.tools.awaited.port import TaskEnded
from perdure.tools.awaited.task import CeleryTool
from perdure.turns.calls.awaited import finish
from perdure.turns.lease.tenure import Before, TurnRow
from perdure.turns.recording import CONVERSATION, FORMAT, VERSION

_NO_DIFFERENCE = "no difference"
_SHOWN_CHARS = 200
_NO_BUNDLE = "this is no recorded turn: `perdure turns export TURN_ID` prints one"
_MEMBERS = frozenset({
    "turn_id", "user_id", "tenant", "channel", "previous_channel", "metadata", "started_at", "timezone", "status",
    "reply", "error", "history", "messages", "calls", "prompt", "not_reproduced",
})  # fmt: skip
"""The members of a bundle that a replay reads."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a replay did otherwise than the recorded turn. It is false if there is nothing, and `str` shows it.

    Attributes:
        status: The statuses of the recorded turn and of the replay; `None` if they are the same.
        reply: The texts of the replies, likewise.
        data: The data of the replies, likewise.
        calls: The tool calls that only one of the two has, each as `+ price({"article": "ink"})` or `- …`, and the
            calls with another result.
        instructions: The lines of the instructions that only one of the two has, each with `+` or `-`.
        tools: The names of tools that only one of the two has, each with `+` or `-`; `~` marks other parameters.
    """

    status: tuple[str, str] | None = None
    reply: tuple[str | None, str | None] | None = None
    data: tuple[Any, Any] | None = None
    calls: tuple[str, ...] = ()
    instructions: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self != Difference()

    def __str__(self) -> str:
        return "\n".join(self._lines()) or _NO_DIFFERENCE

    def _lines(self) -> Iterator[str]:
        for name in ("status", "reply", "data"):
            pair = getattr(self, name)
            if pair is not None:
                yield f"{name}:"
                yield f"  - {_shown(pair[0])}"
                yield f"  + {_shown(pair[1])}"
        for name in ("calls", "instructions", "tools"):
            lines = getattr(self, name)
            if lines:
                yield f"{name}:"
                yield from (f"  {line}" for line in lines)


@dataclass(frozen=True, slots=True)
class Replay:
    """A replay of a recorded turn: what the agent did, and the difference from the recording.

    Attributes:
        answer: The turn as `perdure.testing.ask` returns it.
        requests: What the model received. Empty for a model of pydantic-ai.
        difference: What is different.
        not_recorded: The calls that the recording has no result of.
    """

    answer: Answer
    requests: tuple[ModelRequest, ...]
    difference: Difference
    not_recorded: tuple[str, ...] = ()

    @property
    def reply(self) -> str | None:
        return self.answer.reply

    @property
    def data(self) -> Any:
        return self.answer.data


class Recorded:
    """A recorded turn, or the turns of a recorded conversation. Made by `recorded`.

    Attributes:
        bundle: The bundle of the turn, as JSON values; of a conversation, of its last turn.
        turns: The turns of a conversation, in their order. Each is replayed after the recorded turns before it. Of a
            turn, itself only.
    """

    def __init__(self, bundle: Mapping[str, Any], turns: tuple[Recorded, ...] = ()) -> None:
        self.bundle = bundle
        self.turns = turns or (self,)

    @property
    def text(self) -> str:
        """The user's message."""
        return "\n".join(each["content"] for each in self.bundle["messages"] if each["role"] == Role.USER)

    @property
    def reply(self) -> str | None:
        """The recorded reply."""
        found = self.bundle["reply"]
        return None if found is None else str(found["text"])

    @property
    def not_reproduced(self) -> tuple[str, ...]:
        """What a replay lacks, as the export says."""
        return tuple(self.bundle["not_reproduced"])

    def replay(
        self,
        agent: Any,
        *,
        model: Any = None,
        settings: Settings | None = None,
        agents: Sequence[Any] = (),
        runs_missing: bool = False,
    ) -> Replay:
        """Run the recorded message with `agent`, of perdure or of pydantic-ai.

        Args:
            agent: The agent, perhaps a changed one.
            model: A `Scripted`, another model, or a name in the form of `PERDURE_MODEL`, whose settings are then read
                from the environment. By default, the recorded replies answer.
            settings: As for `perdure.testing.ask`.
            agents: Other agents that tools of the agent refer to by name only. The recording has their answers.
            runs_missing: Run the tool itself for a call that is not in the recording. By default, the model reads an
                error that says so.

        Raises:
            ScriptExhausted: the model was called more often than it is recorded.
        """
        own = adopt(agent, model)
        asked = _Watched(self._model(model)) if model is None or isinstance(model, str) or _is_model(model) else model
        answers = _Answers(self.bundle, runs_missing=runs_missing)
        conversation = _Replaying(agent, asked, self.bundle, answers, settings, agents)
        answer = conversation.ask(self.text)
        requests = tuple(asked.requests) if isinstance(asked, _Watched) else ()
        difference = self._difference(own, answer, requests, conversation.made_instructions)
        return Replay(answer, requests, difference, tuple(answers.missing))

    def _model(self, model: Any) -> Model:
        if model is None:
            return _RecordedModel(self.bundle)
        if isinstance(model, str):
            return Models(Settings.load(), SystemClock()).get(model)
        made: Model = model
        return made

    def _difference(
        self, agent: Agent, answer: Answer, requests: Sequence[ModelRequest], instructions: str | None
    ) -> Difference:
        bundle, prompt = self.bundle, self.bundle["prompt"]
        output = agent.output_type
        data = answer.data if output is None or answer.data is None else output.to_json(answer.data)
        before = (bundle["status"], self.reply, (bundle["reply"] or {}).get("data"))
        after = (answer.status, answer.reply, data)
        status, reply, value = (
            None if one == other else (one, other) for one, other in zip(before, after, strict=True)
        )
        told: tuple[str, ...] = ()
        compares = agent.is_own and answer.agent == agent.name  # the prompt is that of the agent that replied
        if compares and prompt["instructions"] is not None:
            made = instructions or (agent.instructions if isinstance(agent.instructions, str) else None)
            told = () if made is None else _lines(prompt["instructions"], made)
        tools: tuple[str, ...] = ()
        if compares and prompt["tools"] is not None and requests:
            tools = _tools(prompt["tools"], {each.name: dict(each.parameters) for each in requests[0].tools})
        return Difference(status, reply, value, _calls(bundle["calls"], answer), told, tools)


class _Sent(Protocol):
    """What `perdure.send` returns."""

    @property
    def turn_id(self) -> UUID: ...


def recorded(source: str | Path | Mapping[str, Any] | UUID | _Sent) -> Recorded:
    """A recorded turn, from the file or the JSON values of a bundle that `perdure turns export` has printed.

    A bundle that `perdure sessions export` has printed is a conversation: `turns` has its turns, and what else the
    result has is of the last one.

    `source` may also be a settled turn, by its id or as `perdure.send` returned it. It is then exported from the
    installation that the environment names (`PERDURE_DATABASE_URL` and so on), by that command.

    Raises:
        SettingsError: the file is no bundle, or one of a later version of perdure; or the turn cannot be exported.

    Example:
        >>> @tool(effect="pure")
        ... def price(article: str) -> float:
        ...     '''Look up what an article costs, in euros.'''
        ...     return 0.8
        >>> assistant = Agent("assistant", "You sell office supplies. Be brief.", tools=[price])
        >>> replay = recorded("recorded_turn.json").replay(assistant, model=Scripted(call(price, "pencil"), "0.8."))
        >>> print(replay.difference)
        reply:
          - A pencil costs 0.8 euros.
          + 0.8.
        instructions:
          - You sell office supplies.
          + You sell office supplies. Be brief.
    """
    if isinstance(source, UUID) or hasattr(source, "turn_id"):
        source = _exported(source if isinstance(source, UUID) else source.turn_id)
    try:  # of bytes, because some shells write what a command prints as UTF-16, or with a byte order mark
        bundle = source if isinstance(source, Mapping) else json.loads(Path(source).read_bytes())
    except ValueError as error:
        raise SettingsError(f"{_NO_BUNDLE} ({error})") from error
    if isinstance(bundle, Mapping) and bundle.get("format") == CONVERSATION and bundle.get("turns"):
        turns = tuple(Recorded(_checked(each)) for each in bundle["turns"])
        return Recorded(turns[-1].bundle, turns)
    return Recorded(_checked(bundle))


def _checked(bundle: Any) -> Mapping[str, Any]:
    """The bundle of a turn.

    Raises:
        SettingsError: it is none, or one of a later version of perdure.
    """
    if not isinstance(bundle, Mapping) or bundle.get("format") != FORMAT:
        raise SettingsError(_NO_BUNDLE)
    if bundle.get("version") != VERSION:
        raise SettingsError(
            f"the bundle has version {bundle.get('version')}; this release of perdure reads version {VERSION}"
        )
    missing = _MEMBERS - bundle.keys()
    if missing:
        raise SettingsError(f"the bundle lacks {', '.join(sorted(missing))}")
    return bundle


def _exported(turn_id: UUID) -> Mapping[str, Any]:
    command = [sys.executable, "-m", "perdure.cli", "turns", "export", str(turn_id)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SettingsError(f"the turn {turn_id} cannot be exported: {done.stderr.strip()}")
    bundle: Mapping[str, Any] = json.loads(done.stdout)
    return bundle


class _Answers:
    """The recorded parts of the prompt and results of calls: a `perdure.runtime.Recording`."""

    def __init__(self, bundle: Mapping[str, Any], *, runs_missing: bool) -> None:
        self.parts: Sequence[Mapping[str, Any]] = bundle["prompt"]["parts"]
        self.case_ids = tuple(bundle["prompt"]["case_ids"])
        self.missing: list[str] = []
        self._runs_missing = runs_missing
        self._lock = threading.Lock()
        self._found: dict[str, list[tuple[str, str]]] = {}
        self.denied: set[str] = set()
        for each in bundle["calls"]:
            if each["status"] == "denied":
                self.denied.add(_key(each["tool"], each["asked"]))
            elif each["ran"]:
                result = each["status"], _own_text(each)
                for arguments in {each["asked"], each["arguments"]}:
                    self._found.setdefault(_key(each["tool"], arguments), []).append(result)
                self._add_parts(each)

    def answer(self, tool: str, arguments: str) -> tuple[str, str] | None:
        """The next recorded result of the call; its last one, if there is no further."""
        key = _key(tool, arguments)
        with self._lock:
            found = self._found.get(key)
            if found:
                return found.pop(0) if len(found) > 1 else found[0]
            self.missing.append(key)
        return None if self._runs_missing else ("failed", f"The recording has no call {key}.")

    def _add_parts(self, call: Mapping[str, Any]) -> None:
        """The results of the tasks of a call with a list of arguments."""
        try:
            lists, results = load_object(call["arguments"]).get("calls"), json.loads(call["result"])
        except (ValueError, TypeError):
            return
        if isinstance(lists, list) and isinstance(results, list) and len(lists) == len(results):
            for arguments, result in zip(lists, results, strict=True):
                status = "done" if "result" in result else "failed"
                text = str(result.get("result", result.get("error")))
                self._found.setdefault(_key(call["tool"], json.dumps(arguments)), []).append((status, text))


class _RecordedCalls(InlineCalls):
    """Answers tasks and external tools from the recording, as `_Answers` does tools."""

    def __init__(self, answers: _Answers, agent: Agent) -> None:
        super().__init__({})
        self._answers = answers
        self._names = {each.task: each.name for each in agent.tool_list if isinstance(each, CeleryTool)}

    def has(self, name: str) -> bool:
        return bool(name)

    def call(self, name: str, arguments: Mapping[str, Any]) -> TaskEnded:
        tool = self._names.get(name, name)
        status, text = self._answers.answer(tool, json.dumps(arguments)) or (
            "failed",
            f"{tool} cannot run in a replay.",
        )
        return TaskEnded(failed=status != "done", value=text)


class _Replaying(Conversation):
    """The conversation in which a recorded turn runs again: with its id, its user, its time and the turns before it."""

    def __init__(  # noqa: PLR0917 (as `Recorded.replay`)
        self,
        agent: Any,
        model: Any,
        bundle: Mapping[str, Any],
        answers: _Answers,
        settings: Settings | None,
        agents: Sequence[Any],
    ) -> None:
        self._bundle = bundle
        self._answers = answers
        clock = MovedClock()
        if bundle["started_at"] is not None:
            clock.advance(datetime.fromisoformat(bundle["started_at"]) - clock.now())
        super().__init__(
            agent,
            model=model,
            user_id=bundle["user_id"],
            tenant=bundle["tenant"],
            channel=bundle["channel"],
            metadata=bundle["metadata"],
            approve=self._decides,
            clock=clock,
            settings=settings or Settings.model_construct(timezone=bundle["timezone"]),
            agents=agents,
        )
        for number, each in enumerate(bundle["history"], start=1):
            self._store.messages.append({**each, "turn_id": UUID(each["turn_id"]), "seq": number})

    @property
    def made_instructions(self) -> str | None:
        """The instructions that a function of the agent made."""
        return self._store.instructions

    def _decides(self, call: ToolCall) -> bool:
        return _key(call.name, call.arguments) not in self._answers.denied

    def _make_calls(self, tasks: Tasks) -> InlineCalls:
        del tasks
        return _RecordedCalls(self._answers, self._agent)

    def _ask_other(self, effect: Effect) -> None:
        found = self._answers.answer(effect.tool, effect.arguments)
        if found is None:
            super()._ask_other(effect)
            return
        finish(self._runtime, effect.effect_id, TaskEnded(failed=found[0] != "done", value=found[1]))

    def _make_runtime(self) -> Runtime:
        return dataclasses.replace(super()._make_runtime(), recording=self._answers)

    def _received(self, text: str, parts: Given | None) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """The recorded files, whose contents a bundle does not have."""
        del parts
        said = (each for each in self._bundle["messages"] if each["role"] == Role.USER)
        return text, tuple(part for each in said for part in each["parts"] or ())

    def _next_turn(self) -> TurnRow:
        bundle = self._bundle
        return dataclasses.replace(
            super()._next_turn(),
            turn_id=UUID(bundle["turn_id"]),
            before=Before(bundle["previous_channel"]),
        )


class _Watched:
    """A model whose requests are kept."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.reads: frozenset[str] = getattr(model, "reads", frozenset())
        self.requests: list[ModelRequest] = []
        self._model = model

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        self.requests.append(request)
        return self._model.respond(request, call)


class _RecordedModel:
    """Gives the recorded replies, and then the error with which the recorded turn failed, if it did."""

    name = "recorded"

    def __init__(self, bundle: Mapping[str, Any]) -> None:
        replies = [each for each in bundle["messages"] if each["role"] == Role.ASSISTANT and each["model"] is not None]
        self._replies = [_reply(each) for each in replies]
        self._error = bundle["error"]
        self._given = 0

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        del request
        self._given += 1
        if self._given <= len(self._replies):
            made = self._replies[self._given - 1]
            call.delta(made.content)
            return made
        if self._error is not None:
            raise _error_of(self._error)
        raise ScriptExhausted(
            f"the recording has {len(self._replies)} replies of the model, and the agent asks for another one: "
            "pass replay(…, model=…)"
        )


def _reply(message: Mapping[str, Any]) -> ModelReply:
    opaque = (message["opaque"] or {}).get("parts") or {}
    text = message["content"] or (opaque.get("text") if message["stop_reason"] == "rejected" else None) or ""
    calls = tuple(ToolCall.from_dict(each) for each in message["tool_calls"] or ())
    ended = message["stop_reason"]
    return ModelReply(
        text,
        calls,
        Usage.from_dict(message["usage"]) if message["usage"] else None,
        message["model"],
        ("tool_calls" if calls else "stop") if ended in {None, "rejected"} else ended,
    )


def _error_of(error: Mapping[str, Any]) -> PerdureError:
    kinds: list[type[PerdureError]] = [PerdureError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((each for each in kinds if each.code == error["code"]), PerdureError)
    made = PerdureError.__new__(kind)
    PerdureError.__init__(made, error["message"])
    return made


def _is_model(model: object) -> TypeGuard[Model]:
    return hasattr(model, "respond")


def _key(tool: str, arguments: str) -> str:
    """A call as text: `price({"article": "ink"})`, whatever the order and spaces of the arguments."""
    try:
        written = json.dumps(load_object(arguments), sort_keys=True, ensure_ascii=False)
    except ValueError:
        written = arguments
    return f"{tool}({written})"


def _own_text(call: Mapping[str, Any]) -> str:
    """The text of a result as the tool gave it: without what the engine adds."""
    text = _unmarked(call) or ""
    if call["status"] == "failed":
        text = text.removeprefix("Error: ")
        with contextlib.suppress(ValueError):
            text = str(load_object(text).get("error", text))  # as pydantic-ai shows a failed call
    return text


def _unmarked(call: Mapping[str, Any]) -> str | None:
    """The result without the line that tells the model of arguments that a person edited: no replay edits any."""
    result: str | None = call["result"]
    changed = f"The arguments of this call were changed to {call['arguments']}\n"
    return None if result is None else result.removeprefix(changed)


def _calls(before: Sequence[Mapping[str, Any]], answer: Answer) -> tuple[str, ...]:
    """The calls that only one of the two made, and those with another result."""
    made = [(_key(each.tool, _as_text(each.arguments)), each.status, each.result) for each in answer.calls]
    had = [(_key(each["tool"], each["asked"]), each["status"], _unmarked(each)) for each in before]
    matcher = difflib.SequenceMatcher(None, [each[0] for each in had], [each[0] for each in made], autojunk=False)
    found: list[str] = []
    for kind, one, one_end, other, other_end in matcher.get_opcodes():
        if kind == "equal":
            for (key, *was), (_, *now) in zip(had[one:one_end], made[other:other_end], strict=True):
                if was != now:
                    found += [f"- {key} → {_shown(was[1])} ({was[0]})", f"+ {key} → {_shown(now[1])} ({now[0]})"]
        else:
            found += [f"- {key}" for key, *_ in had[one:one_end]]
            found += [f"+ {key}" for key, *_ in made[other:other_end]]
    return tuple(found)


def _as_text(arguments: Mapping[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(dict(arguments))


def _lines(before: str, after: str) -> tuple[str, ...]:
    compared = difflib.ndiff(before.splitlines(), after.splitlines())
    return tuple(line for line in compared if line.startswith(("- ", "+ ")))


def _tools(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    gone = [f"- {name}" for name in before if name not in after]
    new = [f"+ {name}" for name in after if name not in before]
    other = [f"~ {name}" for name in after if name in before and before[name] != after[name]]
    return (*gone, *new, *other)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
