"""The steps of a turn of an adapted agent: pydantic-ai decides what comes next, and the turn commits it.

For the loop (`turns.run.loop`), a turn like any other. A step runs the agent on the event loop, and serves its jobs in
the thread of the turn:

    before a model request    commit the results of the previous round, or the reply that the agent rejected; stop here
                              if the turn must stop
    after a model request     keep the reply
    after the agent's hooks   commit what they made of it with the intents of its calls; a reply without calls waits for
                              the end
    before and after a call   see `ledger`
    at the end                the output is the reply of the turn, settled like any other

What must unwind the run, such as a wait for a person, is raised by a job. The run is then cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import anyio.to_thread
from pydantic_ai import RunContext
from pydantic_ai.capabilities import Hooks, ReinjectSystemPrompt
from pydantic_ai.durable_exec import JSON_CODEC
from pydantic_ai.exceptions import ModelAPIError, UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ModelResponsePart,
    SystemPromptPart,
    UserContent,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.run import AgentRunResult
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults, ToolDefinition
from pydantic_ai.usage import RunUsage

from perdure.adapters.pydantic_ai import errors, messages
from perdure.adapters.pydantic_ai.changed import Checked
from perdure.adapters.pydantic_ai.effects import AdaptedTool, RunningCall, running
from perdure.adapters.pydantic_ai.event_loop import Aborted, Running, TurnThread
from perdure.adapters.pydantic_ai.files import ResultFiles
from perdure.adapters.pydantic_ai.ledger import Begin, Calls, Recorded, Unanswered, Undecided
from perdure.adapters.pydantic_ai.own_model import OwnModel, schema_of
from perdure.adapters.pydantic_ai.streaming import streams, unwrapped
from perdure.adapters.pydantic_ai.units import CODEC, Asked, Body, continued, current
from perdure.errors import (
    BudgetExhausted,
    ContentFiltered,
    ContextTooLong,
    GuardRejected,
    OutcomeUnknown,
    PerdureError,
    ProviderError,
    SettingsError,
    ToolError,
    Unavailable,
    loggable,
)
from perdure.files.kinds import IMAGES, PDF
from perdure.ids import new_id
from perdure.models import endings, endpoints
from perdure.models.adapted.errors import refuses_own_parts
from perdure.models.adapted.messages import finish_reason
from perdure.models.endings import why_calls_do_not_run
from perdure.models.protocol import CallAborted, ModelCall, ModelReply, Role, Usage, name_of, read_by
from perdure.models.resilient import CallWindow, wait_within
from perdure.models.windows import Lesson
from perdure.resilience.retry import retrying
from perdure.runtime import Runtime
from perdure.text.tokens import estimate_tokens
from perdure.text.untrusted import storable
from perdure.tools import around, progress
from perdure.tools.variables import VariableSet
from perdure.turns import costs
from perdure.turns.calls.hooked import ToolHooks
from perdure.turns.calls.plan import Planned
from perdure.turns.calls.result_values import Result
from perdure.turns.calls.run_calls import Interrupted
from perdure.turns.lease.tenure import LeaseLost, Tenure
from perdure.turns.outcome import (
    AwaitsCalls,
    AwaitsDecision,
    Ending,
    Failed,
    Lacking,
    Outcome,
    Replied,
)
from perdure.turns.prompt import record
from perdure.turns.prompt.build import Prompt, Told, build, fitting_entries, halved, within_window
from perdure.turns.prompt.files import FileLimits, files_of_results, messages_by_entry
from perdure.turns.prompt.tools import usable_window
from perdure.turns.prompt.window import turns_budget
from perdure.turns.run.call_model import MOST_HALVINGS, size_of_request
from perdure.turns.run.commit import Step
from perdure.turns.run.loop import Turn
from perdure.turns.run.parallel_guards import Refused
from perdure.turns.run.verdict import misconfigured, result_entries
from perdure.turns.transcript import Entry, Transcript

if TYPE_CHECKING:
    from perdure.adapters.pydantic_ai.adapt import AdaptedAgent

log = logging.getLogger(__name__)


class _Lacks(Exception):  # raised by a job, to unwind the run
    """This worker lacks something that the turn needs."""


class _Steered(Exception):  # raised by a job, to unwind the run
    """Messages joined the turn: the agent runs again with them, as after a crash."""


class _Cheaper(Exception):  # raised by a job, to unwind the run
    """A call exceeds a budget: the agent runs again with the cheaper model."""


class _Rejected(Exception):  # raised by the run
    """The function `deps` failed, and with it the turn."""

    def __init__(self, error: PerdureError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True)
class _Answer:
    """The last reply of the model: a response as JSON values, the request's tools, and the model's identifier.

    `run_step` is the number of the run's step that asked for it.
    """

    payload: dict[str, Any]
    parameters: ModelRequestParameters
    model_id: str | None
    run_step: int

    @property
    def response(self) -> ModelResponse:
        return cast("ModelResponse", JSON_CODEC.load(ModelResponse, self.payload))


class AdaptedTurn(Turn):
    """A turn of an adapted agent. A step is a run of the agent: its jobs commit, and its result ends the turn."""

    case_ids: tuple[str, ...] = ()
    _called_at_s = 0.0
    _agent: AdaptedAgent

    def __init__(
        self, runtime: Runtime, tenure: Tenure, agent: AdaptedAgent, transcript: Transcript, variables: VariableSet
    ) -> None:
        super().__init__(runtime, tenure, agent, transcript, variables)
        costs.check_prices(agent, runtime.settings)
        self._asked = agent.asked_model(runtime.settings.model)
        self._model = agent.model_in(runtime)
        self.streams = not isinstance(self._model, OwnModel) and streams(self._model)
        self._called_at_s = tenure.spent_s
        self.prompt: str | list[UserContent] | None = None
        self._call: ModelCall | None = None
        self._thread = TurnThread()
        self._body: Running[Any] | None = None
        self._own_call: ModelCall | None = None
        """The call of a model of perdure."""
        self._pending: Entry | None = None
        """A reply that is not committed. Without calls it is the turn's, unless the agent rejects or changes it."""
        self._answer: _Answer | None = None
        """The last reply of the model, until the agent's hooks have seen it."""
        self._dropped: Usage | None = None
        """The usage of a reply that a hook dropped, or that the model goes on with. The next reply counts it."""
        self._paused: list[ModelResponsePart] = []
        """What the model has written of a reply that it goes on with."""
        self._calls: Calls | None = None
        self._tool_error: Exception | None = None
        self._model_error: tuple[Exception | None, Exception | None] = (None, None)
        """The last error of the model as the run sees it, and as perdure knows it."""
        self._limits = runtime.settings.memory
        self._lesson = Lesson(runtime.windows, endpoints.canonical(name_of(self._asked), runtime.settings))
        self._halvings = 0
        self._too_long: ContextTooLong | None = None
        self._forgets = False
        """Whether the provider has refused the signatures of its own earlier replies."""
        self._size: tuple[int, int, str | None] = (0, 0, None)
        self._tokens = 0
        self._fallback_waits = False
        self._result_files = ResultFiles(runtime.files, self._row.user_id, self._row.session_id)
        self._built: Prompt | None = None
        self._record: Mapping[str, Any] | None = None
        self._last_record: Mapping[str, Any] | None = None

    def _step(self) -> Outcome | None:
        """Run the agent until the turn ends or stops.

        Raises:
            CallAborted, Interrupted: the turn must stop.
            PerdureError: the model failed.
        """
        self._pending, self._calls, self._thread, self._tool_error = None, None, TurnThread(), None
        self._answer, self._paused = None, []
        try:
            given = self._given()
            self._resume()
            work = contextvars.copy_context().run(lambda: lambda: self._run_agent(*given))
            self._tenure.step_within(self._timeout_s)
            found = self._thread.run(work, self._tenure)
            return None if found is None else self._conclude(found)
        except messages.Unreadable:
            return Lacking("a version of pydantic-ai that reads the turn's messages")
        except _Lacks as error:
            return Lacking(str(error))
        except Undecided:
            return self._announce_waiting()
        except Unanswered:
            return self._awaits_client()
        except Exception as error:  # noqa: BLE001 (raised again unless the agent caused it)
            return self._failed(error)

    def _failed(self, error: Exception) -> Failed | AwaitsCalls | None:  # noqa: C901 (a case for each error)
        """The outcome for an error that ended the run, if it is no failure of the model; `None`: the agent runs again.

        Raises:
            PerdureError: the model failed.
            Exception: `error`, if the agent's own code raised it.
        """
        if self._calls is not None:
            self._calls.keep()
        if isinstance(error, _Cheaper):
            self._ask_cheaper()
        if isinstance(error, _Steered | _Cheaper):
            return None
        if error is self._tool_error:  # as in a plain run, the error of a tool ends it
            log.error("turn %s: a tool of its agent raised an error", self._row.turn_id, exc_info=error)
            return Failed(ToolError("A tool of this agent failed, so I stopped."))
        if isinstance(error, UserError) and self._calls is not None and self._calls.waits:
            return self._awaits_client()  # an approved call was deferred, for which no handler is asked again
        if isinstance(error, _Rejected):
            return Failed(error.error)
        if isinstance(error, Refused):
            raise error
        if isinstance(error, UserError | SettingsError):
            log.error("turn %s: its agent cannot run", self._row.turn_id, exc_info=error)
            return Failed(misconfigured())
        if isinstance(error, Aborted) and self._tenure.stopping.is_set():
            raise Interrupted from error
        raised, known = self._model_error
        found = known if error is raised and known is not None else errors.of_run(error, self._runtime.clock)
        if self._may_ask_otherwise(error, found):
            self._text.rewind()
            return None
        raise found or error

    def _may_ask_otherwise(self, error: Exception, found: Exception | None) -> bool:
        """Whether the agent runs again with a prompt without what the model refused."""
        if not self._forgets and refuses_own_parts(error):
            log.warning("turn %s: the model refused its own signatures, and is asked again without", self._row.turn_id)
            self._forgets = True
            return True
        if isinstance(found, ContextTooLong) and self._halvings < MOST_HALVINGS:
            log.info("turn %s: its prompt is too long: %s", self._row.turn_id, loggable(found))
            self._halvings += 1
            self._too_long = found
            return True
        return False

    def _given(self) -> tuple[str | list[UserContent] | None, list[ModelMessage], str | None]:
        """The prompt, the messages before it, and the instructions of a run: smaller ones after one was too long.

        Raises:
            ContextTooLong: half of the budgets leaves nothing out.
        """
        if self._too_long is not None:
            self._limits = halved(self._limits, self._tokens)
        elif not self._halvings:
            self._limits = within_window(self._runtime.settings.memory, usable_window(self._runtime, self._agent))
            self._let_leave(self._limits)
        self._built = built = self._recalled()
        prompt, history = self._read_history(built)
        instructions = None if built is None else "\n\n".join(built.system)
        size = (len(history), messages.files_in(prompt), instructions)
        if self._too_long is not None and size == self._size:
            if not self._fallback_waits:
                raise self._too_long
            self._halvings = MOST_HALVINGS  # the same prompt, for the fallback
        entries = (entry for turn in self.transcript.turns for entry in turn)
        self._tokens = sum(entry.token_count for entry in entries) + estimate_tokens(instructions or "")
        self._too_long, self._size = None, size
        return prompt, history, instructions

    def _awaits_client(self) -> AwaitsCalls:
        open_reply = self.transcript.open_reply()
        if open_reply is None:
            raise LookupError("no call waits for a client")
        return AwaitsCalls(open_reply.seq or 0, ())

    def _end(self, ending: Ending) -> Ending:
        if self._calls is not None:  # the run ended in the middle of a round
            self._calls.close_unbegun()
        return super()._end(ending)

    # --- the run, on the event loop ---------------------------------------------------------

    async def _run_agent(
        self, prompt: str | list[UserContent] | None, history: list[ModelMessage], instructions: str | None
    ) -> AgentRunResult[Any]:
        current.set(self)
        async with around.surrounded_coroutine():
            given = self._agent.given_model(self._model)
            return await self._agent.wrapped.run(
                prompt,
                message_history=history,
                conversation_id=str(self._tenure.session_id),
                model=given,
                deps=await self._deps(),
                instructions=instructions,
                model_settings=_without_retries,
                usage=messages.usage_of_run(self.transcript.present),
                usage_limits=self._agent.usage_limits,
                capabilities=[
                    ReinjectSystemPrompt(),
                    Hooks(before_node_run=continued),
                    self._agent.durability(given),
                ],
                infer_name=False,
            )

    async def _deps(self) -> Any:
        """The dependencies of the run. A factory has the time limit of a hook, and fails the turn as a required one.

        Raises:
            _Rejected: the factory failed.
        """
        factory = self._agent.deps
        if factory is None:
            return None
        try:
            async with asyncio.timeout(self._runtime.settings.turn.hook_timeout_s):
                found = await anyio.to_thread.run_sync(factory, self._hooks.seen(), abandon_on_cancel=True)
                return await found if asyncio.iscoroutine(found) else found
        except PerdureError as error:
            raise _Rejected(error) from error
        except Exception as error:
            log.exception("turn %s: the function deps of its agent failed", self._row.turn_id)
            raise _Rejected(GuardRejected("A guard of this installation refused this.")) from error

    async def request_model(self, body: Body, asked: Asked) -> Any:
        """Run one model request; see `units.Run`."""
        present = contextvars.copy_context()

        async def answer() -> Any:
            return await body()

        def request() -> Any:
            return self._request(lambda: Running(answer, present), asked)

        try:
            found = await self._thread.do(request)
        except asyncio.CancelledError:
            if self._body is not None:
                self._body.cancel()
            elif self._own_call is not None:  # a deadline of the agent's own, such as `request_timeout`
                self._own_call.expire()
            raise
        if isinstance(found, Exception):
            raise found
        return found

    async def call_tool(
        self,
        body: Body,
        arguments: dict[str, Any],
        context: RunContext[Any],
        definition: ToolDefinition | None,
        checked: Checked,
    ) -> Any:
        """Run one tool call, or return its recorded result; see `units.Run`."""
        name, calls = context.tool_call_id, self._calls
        if name is None or calls is None or not calls.has(name):
            raise UserError("perdure runs a tool only for a call of a model's reply, not for one that a hook has added")
        approved = bool(context.tool_call_approved)
        found = await self._thread.do(lambda: calls.begin(name, arguments, definition, approved=approved))
        while isinstance(found, Begin):
            work = partial(self._hooked, calls, found.position, body, arguments, checked)
            found = await self._attempt(calls, work, found)
        return found.payload

    async def _attempt(self, calls: Calls, work: Body, begun: Begin) -> Begin | Recorded:
        """Run the tool once, for at most the time that is left for the call."""
        position = begun.position
        running.set(RunningCall(begun.effect_id))
        progress.reporter.set(calls.reporter(position))
        task = asyncio.ensure_future(_contained(work))
        running.set(None)
        progress.reporter.set(None)
        try:
            with self._runtime.measures.timed("tools", self._runtime.clock):
                await asyncio.wait({task}, timeout=begun.left_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()  # a plain function runs on in its thread, detached from the turn
            task.add_done_callback(_forget)
            return await self._thread.do(lambda: calls.overdue(position, running=True))
        try:
            payload = task.result()
        except OutcomeUnknown as error:
            message = error.message
            return await self._thread.do(lambda: calls.overdue(position, running=False, message=message))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (raised again)
            # A tool may await what was cancelled: its error then is no cancellation of the run.
            failure = error if isinstance(error, Exception) else ToolError("CancelledError: the tool was aborted.")
            self._tool_error = failure
            await self._thread.do(lambda: calls.failed(position, failure))
            raise failure from error.__cause__
        await self._thread.do(lambda: calls.finish(position, payload))
        return Recorded(payload)

    async def _hooked(
        self, calls: Calls, position: int, body: Body, arguments: dict[str, Any], checked: Checked
    ) -> Any:
        """Run the tool between the agent's hooks. `body` runs it with `arguments`, which the hooks may change."""
        if self._agent.before_tool:
            found = await anyio.to_thread.run_sync(calls.check_call, position, checked)
            if isinstance(found, Recorded):
                return found.payload
            changed = dict(found)
            arguments.clear()
            arguments.update(changed)
        payload = calls.recorded(position)
        if payload is None:
            payload = await body()
        return await anyio.to_thread.run_sync(calls.check_result, position, payload)

    async def accept(self, response: ModelResponse) -> None:
        """Take the reply with which the run goes on; see `units.Run`."""
        answer, self._answer = self._answer, None
        if answer is None:  # an earlier run has committed the reply, or no model has made it
            return
        paused, self._paused = self._paused, []
        is_changed = [*paused, *answer.response.parts] != response.parts
        if is_changed or paused or response.tool_calls:
            await self._thread.do(lambda: self._accept(answer, response, is_changed=is_changed))

    async def decide(
        self, requests: DeferredToolRequests, definitions: Mapping[str, ToolDefinition]
    ) -> DeferredToolResults:
        """The answers for calls that wait for a person or a client; see `units.Run`."""
        calls = self._calls
        if calls is None:
            raise UserError("perdure waits only for calls of a model's reply")
        return await self._thread.do(lambda: calls.decide(requests, definitions))

    def delta(self, text: str) -> None:
        """Report streamed text; see `units.Run`."""
        if self._call is not None:
            self._call.delta(text)

    # --- the jobs, in the turn's thread -----------------------------------------------------

    def _request(self, start: Callable[[], Running[Any]], asked: Asked) -> Any:
        """Commit what came before, and call the model. Returns the model's error, if it failed."""
        model_id = asked.model_id
        self._close_round(asked)
        if self._why_stop() is not None:
            raise Interrupted
        if self._budget.is_set:
            self._reserve(asked)
        try:
            dropped = self._dropped  # the next request replaces it
            payload = self._screened(
                lambda: self._respond(start, asked),
                lambda found: _counting(self._read_reply(found, model_id)[2], dropped),
            )
        except (CallAborted, Interrupted, LeaseLost, Refused):
            raise
        except Exception as error:  # noqa: BLE001 (raised in the run, which may have another model)
            raised = errors.as_raised(error, self._name_of(asked))
            self._model_error = raised, error
            return raised
        self._note(asked)
        self._answer = answer = _Answer(payload, asked.parameters, model_id, asked.context.run_step)
        made, self._pending = self._reply(answer)
        if self.streams and (lines := made.content.removeprefix(answer.response.text or "")):
            self._text.delta(lines)
        if endings.normalized(made.stop_reason) == endings.CONTENT_FILTER:
            raise ContentFiltered(
                "The model's provider does not allow an answer to this: its content filter stopped it."
            )
        self._tenure.step_within(self._timeout_s)
        return payload

    def _accept(self, answer: _Answer, response: ModelResponse, *, is_changed: bool) -> None:
        """Take what the agent's hooks made of the model's reply. What was streamed is withdrawn if they changed it."""
        if is_changed:
            self._text.rewind()
        parts = CODEC.dump(ModelResponse, response)["parts"]
        answer = replace(answer, payload={**answer.payload, "parts": parts})
        _, self._pending = self._reply(answer)
        self._commit_calls(answer)
        self._tenure.step_within(self._timeout_s)

    def _reserve(self, asked: Asked) -> None:
        """Reserve what the request may cost.

        Raises:
            BudgetExhausted: the request may exceed a budget.
            _Cheaper: it may, and a cheaper model is configured.
        """
        requests = [each for each in asked.messages if isinstance(each, ModelRequest)]
        texts = [each.instructions or "" for each in requests[-1:]]
        texts += [messages.system_text(part) for each in requests for part in each.parts]
        texts += [
            f"{each.name} {each.description} {json.dumps(each.parameters_json_schema)}"
            for each in (*asked.parameters.function_tools, *asked.parameters.output_tools)
        ]
        said = sum(entry.token_count for turn in self.transcript.turns for entry in turn)
        try:
            self._budget.reserve(
                self._asked, said + sum(map(estimate_tokens, texts)), (asked.settings or {}).get("max_tokens")
            )
        except BudgetExhausted as error:
            cheaper = self._runtime.settings.budget.cheaper_model
            if cheaper is None or self._asked == cheaper:
                raise
            log.info("turn %s: the model %s answers: %s", self._row.turn_id, cheaper, error.message)
            raise _Cheaper from error

    def _note(self, asked: Asked) -> None:
        """Make the record of the prompt. Of the instructions, only their digest is known."""
        transcript, budget = self.transcript, turns_budget(self._limits)
        requests = [each for each in asked.messages if isinstance(each, ModelRequest)]
        texts = [part.content for each in requests for part in each.parts if isinstance(part, SystemPromptPart)]
        texts += [each.instructions or "" for each in requests[-1:]]
        earlier = fitting_entries(transcript, budget).earlier
        made = record.of_call(
            self._agent, self._name_of(asked), asked.settings or {},
            instructions=record.of_instructions("\n\n".join(texts), None),
            parts=() if self._built is None else self._built.parts, earlier=earlier, budget=budget,
            tools=[schema_of(each) for each in (*asked.parameters.function_tools, *asked.parameters.output_tools)],
            is_noted=self._built is not None,
        )  # fmt: skip
        self._record, self._last_record = record.shortened(made, self._last_record), made

    def _ask_cheaper(self) -> None:
        """Give the turn's further requests by this process to the cheaper model."""
        runtime, cheaper = self._runtime, self._runtime.settings.budget.cheaper_model
        assert cheaper is not None  # noqa: S101 (else nothing raises `_Cheaper`)
        self._asked = cheaper
        self._model = OwnModel.of(runtime.models(cheaper), runtime)
        self.streams = False
        self._lesson = Lesson(runtime.windows, endpoints.canonical(cheaper, runtime.settings))

    def _respond(self, start: Callable[[], Running[Any]], asked: Asked) -> Any:
        """Call the model within the turn's time limit; returns the response as JSON values."""
        runtime = self._runtime
        self._called_at_s = self._tenure.spent_s
        limit_s = max(self._timeout_s - self._called_at_s, 0.001)
        call = ModelCall(runtime.clock, limit_s, self._text.delta, self._text.rewind)
        call.may_shorten = self._halvings < MOST_HALVINGS
        self._tenure.step_within(limit_s)
        model, name = unwrapped(asked.model), self._name_of(asked)
        with self._tenure.calling(call), self._guards.over(call):
            if isinstance(model, OwnModel):
                try:
                    request = model.prompt(
                        asked.messages, asked.settings, asked.parameters, str(self._tenure.session_id)
                    )
                    self._own_call = call
                    reply = model.own.respond(request, call)
                except ContextTooLong:
                    self._lesson.refused(size_of_request(request))
                    raise
                except Unavailable as error:
                    raise ProviderError(error.message) from error
                finally:
                    self._own_call, self._fallback_waits = None, call.fallback_waits
                if not reply.fallback:
                    self._lesson.accepted(partial(size_of_request, request))
                return CODEC.dump(ModelResponse, model.response(reply))
            with call.part(runtime.settings.model_timeout_s) as part:
                call_window = CallWindow(part, wait_within)

                def attempts() -> Any:
                    return retrying(
                        name,
                        lambda: self._attempt_request(start, part, model),
                        runtime.settings.retry,
                        call_window,
                        random.random,
                    )

                if runtime.breakers is None:
                    return self._measured(attempts, name, asked)
                breaker = runtime.breakers.get(f"llm:{name}")
                return self._measured(lambda: breaker.execute(attempts, part.remaining()), name, asked)

    def _name_of(self, asked: Asked) -> str:
        """The name of the model of a request, which a capability of the agent may have chosen."""
        return self._model_name if isinstance(unwrapped(asked.model), OwnModel) else asked.model_id or self._model_name

    def _measured(self, call: Callable[[], Any], name: str, asked: Asked) -> Any:
        measures, clock, settings = self._runtime.measures, self._runtime.clock, self._runtime.settings
        began = clock.monotonic()
        try:
            payload = call()
        except BaseException as error:
            measures.model_called(name, clock.monotonic() - began, None, error, settings)
            raise
        usage = self._read_reply(payload, asked.model_id)[1].usage
        measures.model_called(name, clock.monotonic() - began, usage, None, settings)
        return payload

    def _attempt_request(self, start: Callable[[], Running[Any]], part: ModelCall, model: object) -> Any:
        self._call = part  # before the request begins to stream to it
        self._body = body = start()
        try:
            with part.aborting(body.cancel):
                while not body.wait(part.remaining()):
                    pass
                return _ended(body.result(), model)
        except asyncio.CancelledError as error:
            part.check()
            raise ProviderError("The model's request was cancelled.") from error
        except PerdureError:
            raise
        except Exception as error:
            found = errors.of_model(error, self._runtime.clock)
            if found is None:
                raise
            part.rewind()
            raise found from error
        finally:
            self._call, self._body = None, None

    def _close_round(self, asked: Asked) -> None:
        """Commit the results of the open calls, or the reply that the agent rejected.

        A reply that a hook dropped (`RetryModelRequest`) is no message of the run, so it is not stored. Nor is one that
        the model goes on with, which is part of the next.

        Raises:
            _Steered: messages joined the turn.
        """
        if self._answer is not None and self._answer.run_step == asked.context.run_step:
            goes_on = self._answer.response.state == "suspended"
            self._paused = [*self._paused, *self._answer.response.parts] if goes_on else []
            self._dropped = None if self._pending is None else self._pending.usage
            self._pending = self._answer = None
            if not goes_on:
                self._text.rewind()
        lacking = (
            None if self._calls is None else self._calls.lacks({each.name for each in asked.parameters.function_tools})
        )
        if lacking is not None and not self._tenure.overdue:
            raise _Lacks(f"the tool {lacking!r} of the agent {self._agent.name!r}")
        entries, results = self._round(messages.last_requests(asked.context.messages), asked.context.usage)
        if entries:
            committed = self._commit_round(Step([*self.transcript.uncommitted, *entries], results=results))
            if committed.joined:
                raise _Steered

    def _round(self, requests: Sequence[ModelRequest], usage: RunUsage) -> tuple[list[Entry], list[Result]]:
        """The uncommitted reply or the results of the open calls, with what the model receives after it."""
        pending, calls = self._pending, self._calls
        self._pending = self._answer = self._calls = None
        if pending is not None:
            self._dropped = None
            entries = [pending, *result_entries(pending, [_why_not_run(pending)] * len(pending.tool_calls))]
            last = messages.with_requests(entries[-1], requests, usage, self._result_files.referring)
            return [*entries[:-1], last], []
        if calls is None:
            return [], []
        texts, results = calls.results(messages.result_texts(requests))
        entries = result_entries(calls.open_reply, texts)
        last = messages.with_requests(entries[-1], requests, usage, self._result_files.referring)
        return [*entries[:-1], last], results

    def _read_reply(self, payload: Any, model_id: str | None) -> tuple[ModelResponse, ModelReply, Entry]:
        response: ModelResponse = JSON_CODEC.load(ModelResponse, payload)
        record = {**payload, "model_id": response.model_id or model_id}  # as pydantic-ai sets it after the request
        return response, *messages.reply_of(response, record, self._row.turn_id, self.transcript.call_ids)

    def _reply(self, answer: _Answer) -> tuple[ModelReply, Entry]:
        """The reply as the engine judges it, and its row. Its files are stored.

        Raises:
            PerdureError: a file cannot be stored now.
        """
        response = answer.response
        record = {**answer.payload, "model_id": response.model_id or answer.model_id}
        stored = self._result_files.take_reply(record, self._row.turn_id)
        made, reply = messages.reply_of(response, stored, self._row.turn_id, self.transcript.call_ids)
        return made, replace(_counting(reply, self._dropped), prompt=self._record)

    def _commit_calls(self, answer: _Answer) -> None:
        """Commit the reply with the intents of its calls. A reply without calls is kept until the run goes on."""
        reply = self._pending
        if reply is None or not reply.tool_calls:
            return
        if self._tenure.shutting_down:
            raise Interrupted  # no time is left to run the tools: without a commit, the model is asked again
        definitions = {each.name: each for each in answer.parameters.function_tools}
        planned = {
            position: self._plan(position, reply, definitions[call.name])
            for position, call in enumerate(reply.tool_calls)
            if call.name in definitions and definitions[call.name].kind == "function"
        }
        intents = [each.intent() for each in planned.values()]
        # A reply that calls an output tool may end the turn, so the session's state stays that of a model's reply.
        runs_tools = all(call.name in definitions for call in reply.tool_calls)
        made_step = Step([*self.transcript.uncommitted, reply], runs_tools=runs_tools, intents=intents)
        at = self._commit(made_step).sent_at
        open_reply = self.transcript.open_reply()
        if open_reply is None:
            raise LookupError("the committed reply has no open calls")
        self._pending = self._dropped = None
        self._calls = self._made_calls(open_reply, answer.response, planned)
        self._calls.committed(at)

    def _plan(self, position: int, reply: Entry, definition: ToolDefinition) -> Planned:
        call = reply.tool_calls[position]
        tool = AdaptedTool.of(definition.name, definition.metadata, definition.timeout)
        timeout_s = tool.timeout_s or self._runtime.settings.turn.tool_timeout_s
        return Planned(position, call, new_id(self._runtime.clock), tool, timeout_s=timeout_s)

    def _made_calls(self, open_reply: Entry, response: ModelResponse, planned: Mapping[int, Planned]) -> Calls:
        return Calls(
            self._runtime, self._tenure, self._agent, self._variables, open_reply, response.tool_calls, planned,
            self._result_files,
        )  # fmt: skip

    # --- before and after the run -----------------------------------------------------------

    def _read_history(self, built: Prompt | None) -> tuple[str | list[UserContent] | None, list[ModelMessage]]:
        """The prompt, if the model has not answered it, and the messages before it. The note of `built` is one of them.

        Raises:
            Unreadable: a message of the turn cannot be read, and another worker may read it.
        """
        fitting = fitting_entries(self.transcript, turns_budget(self._limits))
        earlier = [list(each) for _, each in groupby(fitting.earlier, key=lambda entry: entry.turn_id)]
        told, data = self._rendered(fitting, built)
        note = [] if built is None else [ModelRequest(parts=[UserPromptPart(messages.Note(built.note))])]
        strictly = None if self._tenure.overdue else self._row.turn_id
        asked = list(takewhile(lambda entry: entry.role is Role.USER, fitting.present))
        self.prompt = _prompt([told(entry) for entry in asked]) or _safe(
            "\n".join(each.content for each in asked), built
        )
        if len(asked) == len(fitting.present):
            before = messages.history(earlier, strictly=None, told=told, data=data)
            return self.prompt, self._sent_back([*before, *note])
        before = messages.history(earlier, strictly=strictly, told=told, data=data)
        present = messages.history([fitting.present], strictly=strictly, told=told, data=data)
        return None, self._sent_back([*before, *note, *present])

    def _sent_back(self, history: list[ModelMessage]) -> list[ModelMessage]:
        return messages.without_signatures(history) if self._forgets else history

    def _rendered(
        self, fitting: Told, built: Prompt | None
    ) -> tuple[Callable[[Entry], str | list[UserContent]], messages.Data]:
        """What a user's message tells the model, and the bytes of the files of tools: the files that fit into a prompt.

        See `turns.prompt.files`.
        """
        model, most_bytes = self._model, self._runtime.settings.files.prompt_bytes
        media_types = read_by(model.own) if isinstance(model, OwnModel) else {*IMAGES, PDF}
        limits = FileLimits(
            media_types,
            self._limits.budget_files,
            most_bytes,
            is_strict=self._halvings > 0,
            naming=(Role.TOOL, Role.ASSISTANT),
        )
        rendered = messages_by_entry(*fitting, self._runtime.files, limits, self._row.user_id)
        found = {
            id(entry): each[0]
            for entry, each in zip([*fitting.earlier, *fitting.present], rendered, strict=True)
            if each
        }
        returned = files_of_results(message for each in rendered for message in each)

        def told(entry: Entry) -> str | list[UserContent]:
            said = found[id(entry)]
            return messages.content_of(replace(said, content=_safe(said.content, built)), media_types)

        return told, lambda reference: returned.get(UUID(reference["file_id"]))

    def _recalled(self) -> Prompt | None:
        """What perdure remembers of the user. The system prompt is added to the agent's instructions."""
        if not self._agent.memory:
            return None
        built = build(
            self._runtime, self._tenure, self._row, self._agent, self.transcript, instructions="", limits=self._limits
        )
        self.case_ids = built.case_ids
        return built

    def _resume(self) -> None:
        """Read the rows of the open calls, and wait until those in doubt can be decided."""
        open_reply = self.transcript.open_reply()
        if open_reply is None:
            return
        turns = messages.history([self.transcript.present], strictly=None)
        response = next(each for each in reversed(turns) if isinstance(each, ModelResponse))
        self._calls = self._made_calls(open_reply, response, {})
        wait_s = self._calls.read()
        if wait_s > 0:
            self._tenure.step_within(wait_s)
            if self._tenure.stopping.wait(wait_s):
                raise Interrupted

    def _conclude(self, result: AgentRunResult[Any]) -> Replied:
        """The turn's reply: the text of the last reply, or the output as text."""
        data = None if isinstance(result.output, str) else self._data(result.output)
        text = storable(result.output) if isinstance(result.output, str) else messages.as_text(data)
        pending, earlier = self._pending, []
        if isinstance(result.output, str):
            earlier = messages.made_before(self.transcript.present)
        if pending is not None and not pending.tool_calls and (data is not None or messages.is_text_of(pending, text)):
            return Replied(self._naming(self._with_data(pending, data), earlier), data)
        if pending is not None and isinstance(result.output, str):
            earlier = [*messages.made_in(pending), *earlier]
        calls, requests = self._calls, messages.last_requests(result.all_messages())
        closing, results = self._round(requests, result.usage)
        if calls is not None and calls.runs_tools:
            self._commit(Step(closing, results=results))
            closing = []
        elif calls is not None:
            calls.close(results)
        return Replied(
            messages.rendered(self._row.turn_id, messages.naming(text, earlier)), data, tuple(closing), is_step=False
        )

    def _naming(self, reply: Entry, lines: Sequence[str]) -> Entry:
        """The turn's reply with the lines about files of earlier replies."""
        lines = [each for each in lines if each not in reply.content]
        if not lines:
            return reply
        if self.streams:
            self._text.delta("\n" + "\n".join(lines))
        return replace(reply, content=messages.naming(reply.content, lines))

    def _data(self, output: Any) -> Any:
        """An output that is no text, as JSON values with references to its files."""
        return self._result_files.take_made(messages.as_json(output), self._row.turn_id)

    def _with_data(self, reply: Entry, data: Any) -> Entry:
        """The reply with the JSON of its data as text: what the model wrote, unless that has anything else."""
        with suppress(ValueError, RecursionError):
            if data is None or messages.is_file_of(reply, data) or json.loads(reply.content) == data:
                return reply
        self._text.rewind()
        return replace(reply, content=messages.as_text(data))

    def _announce_waiting(self) -> AwaitsDecision | Failed:
        """Call the agent's hooks for the calls that wait for a person."""
        open_reply = self.transcript.open_reply()
        if open_reply is None or self._calls is None:
            raise LookupError("no call waits for a decision")
        if self._agent.on_approval_waiting:
            try:
                ToolHooks(self._runtime, self._tenure, self._row, self._agent).waiting(open_reply, self._calls.rows())
            except Unavailable:
                raise
            except PerdureError as error:
                return Failed(error)
        return AwaitsDecision(open_reply.seq or 0)

    @property
    def _prompt_tokens(self) -> int:
        return self._tokens

    @property
    def _model_name(self) -> str:
        if isinstance(self._model, OwnModel):
            return self._model.own.name
        return self._model if isinstance(self._model, str) else self._model.model_id


def _counting(reply: Entry, dropped: Usage | None) -> Entry:
    """The reply with what the dropped replies before it used."""
    return reply if dropped is None else replace(reply, usage=dropped + (reply.usage or Usage()))


def _why_not_run(reply: Entry) -> str:
    """The result of each call of a reply that the agent rejected."""
    ended = ModelReply(reply.content, reply.tool_calls, stop_reason=reply.stop_reason or endings.STOP)
    return f"Error: {why_calls_do_not_run(ended) or 'this call was not run.'}"


def _ended(payload: Any, model: object) -> Any:
    """The response, if its server ended it. Models of the author's own classes need not tell why they ended one.

    Raises:
        ModelAPIError: the response ended early.
    """
    is_known = any(each.__module__.startswith("pydantic_ai.models.") for each in type(model).__mro__)
    response: ModelResponse = JSON_CODEC.load(ModelResponse, payload)
    if is_known and not finish_reason(response):
        raise ModelAPIError(response.model_name or "", "The response ended without a finish reason.")
    return payload


def _prompt(asked: Sequence[str | list[UserContent]]) -> list[UserContent]:
    """A prompt with files of a turn's first messages; empty without files."""
    files = [each for content in asked if not isinstance(content, str) for each in content]
    texts = [content for content in asked if isinstance(content, str) and content]
    return [*texts, *files] if files else []


def _safe(text: str, built: Prompt | None) -> str:
    return text if built is None else built.without_code(text)


def _without_retries(context: RunContext[Any]) -> ModelSettings:
    """The settings of a request: the engine retries, not the provider's SDK."""
    model = context.model
    if isinstance(model, Model) and "max_retries" not in model.unsupported_settings:
        return ModelSettings(max_retries=0)
    return ModelSettings()


async def _contained(body: Body) -> Any:
    """Run a tool. An error that would end the event loop becomes one of the tool.

    Raises:
        ToolError: the tool exits the process.
    """
    try:
        return await body()
    except (SystemExit, KeyboardInterrupt) as error:
        raise ToolError(f"{type(error).__name__}: the tool was aborted.") from error


def _forget(task: asyncio.Future[Any]) -> None:
    with suppress(Exception, asyncio.CancelledError):
        task.result()
