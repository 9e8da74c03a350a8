"""Calls the model of a turn: builds the prompt, and builds it again if it is too long for the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from perdure.agents import Agent
from perdure.errors import BudgetExhausted, ContextTooLong, ProviderError, Unavailable, loggable
from perdure.models import endpoints
from perdure.models.endings import checked
from perdure.models.protocol import Message, Model, ModelCall, ModelReply, ModelRequest, Role, name_of, read_by
from perdure.models.settings import of_call
from perdure.models.windows import Lesson
from perdure.runtime import Runtime
from perdure.settings import MemorySettings
from perdure.text.tokens import estimate_tokens
from perdure.text.untrusted import cut
from perdure.tools.sources import Toolset
from perdure.turns.budgets import TurnBudget
from perdure.turns.calls.plan import equip
from perdure.turns.lease.tenure import TurnRow, TurnScope
from perdure.turns.prompt import record
from perdure.turns.prompt.build import Prompt, Told, build, fitting_entries, halved, within_window
from perdure.turns.prompt.files import FileLimits, attached_tokens
from perdure.turns.prompt.tools import MOST_TOOLS, Offered, budget, offered, usable_window
from perdure.turns.run.parallel_guards import HeldText, ParallelGuards
from perdure.turns.transcript import Transcript

log = logging.getLogger(__name__)

_LOGGED_CHARS = 2_000

MOST_HALVINGS = 2
"""How often a turn's prompt is built again with half of the budgets, because it is too long for the model."""


class ModelCaller:
    """Calls the model of `turn`, with its agent's tools, within `timeout_s` seconds of the turn's run time.

    Attributes:
        name: The model's name.
        tools: The agent's tools at the last call.
        called_at_s: The turn's run time at the beginning of the last call.
        prompt_tokens: An estimate of the tokens of the last prompt.
        record: What is stored of the last prompt.
    """

    def __init__(
        self,
        runtime: Runtime,
        scope: TurnScope,
        turn: TurnRow,
        agent: Agent,
        transcript: Transcript,
        *,
        text: HeldText,
        guards: ParallelGuards,
        timeout_s: float,
        on_left_out: Callable[[Sequence[str]], None],
        instructions: Callable[[], str],
        let_leave: Callable[[MemorySettings], None],
        budget: TurnBudget,
    ) -> None:
        """`on_left_out` stores the names of tools that do not fit the prompts. `instructions` are the turn's.

        `let_leave` removes the turns from `transcript` that do not fit the limits.
        """
        self._asked = asked = agent.asked_model(runtime.settings.model)
        self.name = endpoints.canonical(name_of(asked), runtime.settings)
        self.tools = Toolset()
        self.called_at_s = scope.spent_s
        self.record: Mapping[str, Any] | None = None
        self._last_record: Mapping[str, Any] | None = None
        self._runtime = runtime
        self._scope = scope
        self._turn = turn
        self._agent = agent
        self._transcript = transcript
        self._text = text
        self._guards = guards
        self._timeout_s = timeout_s
        self._on_left_out = on_left_out
        self._instructions = cache(instructions)
        self._let_leave = let_leave
        self._budget = budget
        self._model: Model = runtime.models(asked)
        self._window: int | None = None
        self._limits = runtime.settings.memory
        self._prompt: Prompt | None = None
        self._told = Told([], [])
        self._sent: tuple[Message, ...] = ()
        self._halvings = 0
        self._lesson = Lesson(runtime.windows, self.name)
        self._fallback_waits = False
        self._left_out: tuple[str, ...] = ()

    @property
    def case_ids(self) -> tuple[str, ...]:
        """The ids of the cases in the prompt."""
        return () if self._prompt is None else self._prompt.case_ids

    @property
    def prompt_tokens(self) -> int:
        """An estimate of the tokens of the last prompt's texts."""
        return sum(estimate_tokens(each.content) for each in self._sent)

    def call(self) -> ModelReply:
        """The model's reply. If the prompt is too long for the model, it is built again with smaller budgets.

        Raises:
            ContextTooLong: after `MOST_HALVINGS`, or if a smaller budget leaves nothing out.
            BudgetExhausted: the call may exceed a budget (`turns.budgets`).
            PerdureError: the model failed.
            CallAborted: the turn must stop; the scope has the reason.
        """
        request = self._affordable(self._request())
        while True:
            try:
                reply = self._respond(request)
            except ContextTooLong as error:
                self._lesson.refused(size_of_request(request))
                self._text.rewind()
                log.info("turn %s: its prompt is too long: %s", self._transcript.turn_id, loggable(error))
                request = self._smaller_request(request, error)
                continue
            if not reply.fallback:
                self._lesson.accepted(partial(size_of_request, request))
            self._note(request)
            return reply

    def _note(self, request: ModelRequest) -> None:
        """Make the record of the prompt. The turn's reply before it, if this process wrote one, has the last record."""
        prompt = self._prompt
        if prompt is None:
            return
        made = record.of_call(
            self._agent, self.name, request.settings,
            instructions=prompt.instructions, parts=prompt.parts, earlier=self._told.earlier, budget=prompt.budget,
            tools=request.tools,
        )  # fmt: skip
        self.record, self._last_record = record.shortened(made, self._last_record), made

    def _affordable(self, request: ModelRequest) -> ModelRequest:
        """Reserve what the call may cost. If it exceeds a budget, it goes to the cheaper model, if one is configured.

        The turn's later calls by this process then go to that model, too.
        """
        cheaper = self._runtime.settings.budget.cheaper_model
        try:
            self._reserve(request)
        except BudgetExhausted as error:
            if cheaper is None or self._asked == cheaper:
                raise
            log.info("turn %s: the model %s answers: %s", self._turn.turn_id, cheaper, error.message)
        else:
            return request
        self._asked, self._model = cheaper, self._runtime.models(cheaper)
        self.name = endpoints.canonical(cheaper, self._runtime.settings)
        self._lesson = Lesson(self._runtime.windows, self.name)
        request = self._request()
        self._reserve(request)
        return request

    def _reserve(self, request: ModelRequest) -> None:
        if self._budget.is_set:
            files = sum(attached_tokens(each) for said in request.messages for each in said.files)
            self._budget.reserve(self._asked, tokens_of_texts(request) + files, request.settings.get("max_tokens"))

    def _request(self) -> ModelRequest:
        if self._prompt is None:
            if not self._halvings:
                self._window = usable_window(self._runtime, self._agent)
                self._limits = within_window(self._runtime.settings.memory, self._window)
                self._let_leave(self._limits)
            self._prompt = build(
                self._runtime, self._scope, self._turn, self._agent, self._transcript,
                instructions=self._instructions(), limits=self._limits,
            )  # fmt: skip
        # Read before each call, because an MCP server's tools may change between two steps.
        self.tools = equip(self._runtime, self._scope, self._agent, self._turn.additions)
        present = self._transcript.present
        most = budget(self._runtime.settings, self._window)
        tools = offered(self.tools, most, (entry.message for entry in present))
        self._report(tools)
        additions = self._turn.additions
        settings = of_call(
            {}, additions.over({**self._runtime.settings.model_settings, **self._agent.settings}),
            tools={each.name for each in tools.sent}, has_results=any(entry.role is Role.TOOL for entry in present),
        )  # fmt: skip
        output = self._agent.output_type or additions.output_type
        return ModelRequest(
            self._messages(self._prompt), tools.sent, settings,
            output=None if output is None else output.schema, requires_output=output is not None,
            cache_key=str(self._turn.session_id),
        )  # fmt: skip

    def _messages(self, prompt: Prompt) -> tuple[Message, ...]:
        limits = FileLimits(
            read_by(self._model),
            self._limits.budget_files,
            self._runtime.settings.files.prompt_bytes,
            is_strict=self._halvings > 0,
        )
        self._told = fitting_entries(self._transcript, prompt.budget)
        return prompt.messages(self._told, self._runtime.files, limits, self._turn.user_id)

    def _report(self, tools: Offered) -> None:
        """Report the names of tools that are left out. Each process logs them once for each agent.

        Raises:
            Unavailable: the database cannot be reached.
        """
        if tools.left_out == self._left_out:
            return
        self._on_left_out(tools.left_out)
        self._left_out = tools.left_out
        logged = self._runtime.tools_left_out
        if tools.left_out and logged.get(self._agent.name) is None:
            logged[self._agent.name] = tools.left_out
            log.warning(
                "agent %s: %d of its tools do not fit into the %d tokens for tools (PERDURE_MEMORY__BUDGET_TOOLS, by "
                "default a share of the model's window), or are more than the %d that providers accept, and are left "
                "out of its prompts: %s",
                self._agent.name, len(tools.left_out), tools.budget, MOST_TOOLS,
                cut(", ".join(tools.left_out), _LOGGED_CHARS),
            )  # fmt: skip

    def _smaller_request(self, before: ModelRequest, error: ContextTooLong) -> ModelRequest:
        """The prompt under half of the budgets. The turn's later prompts keep the smaller budgets.

        If it cannot be smaller, the same prompt is for the fallback, if the model has one.

        Raises:
            ContextTooLong: `error`, because nothing is left to try.
        """
        while self._halvings < MOST_HALVINGS:
            self._halvings += 1
            self._limits = halved(self._limits, sum(estimate_tokens(each.content) for each in before.messages))
            self._prompt = None
            request = self._request()
            if request != before:
                return request
        if self._fallback_waits:
            return before
        raise error

    def _respond(self, request: ModelRequest) -> ModelReply:
        self.called_at_s = self._scope.spent_s
        # The time limit for the model and its fallbacks together. Each of them also has a time limit of its own.
        limit_s = max(self._timeout_s - self.called_at_s, 0.001)
        call = ModelCall(self._runtime.clock, limit_s, self._text.delta, self._text.rewind)
        call.may_shorten = self._halvings < MOST_HALVINGS
        self._scope.step_within(limit_s)
        self._sent = request.messages
        step = sum(each.role is Role.ASSISTANT for each in self._transcript.present) + 1
        traced = self._runtime.traces.calling(self._turn.turn_id, self._turn.traceparent, step=step)
        with traced, self._scope.calling(call), self._guards.over(call):
            try:
                return checked(self._model.respond(request, call))
            except Unavailable as error:  # the loop would take `Unavailable` for a database error and retry
                raise ProviderError(error.message) from error
            finally:
                self._fallback_waits = call.fallback_waits


def size_of_request(request: ModelRequest) -> int | None:
    """An estimate of the tokens of a prompt; `None` if it has files, whose size each provider counts in its own way."""
    return None if any(each.files for each in request.messages) else tokens_of_texts(request)


def tokens_of_texts(request: ModelRequest) -> int:
    """An estimate of the tokens of a prompt without its files."""
    calls = (call.name + call.arguments for each in request.messages for call in each.tool_calls)
    texts = [*(each.content for each in request.messages), *calls]
    return sum(map(estimate_tokens, texts)) + sum(each.tokens for each in request.tools)
