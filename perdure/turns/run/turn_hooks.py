"""Calls the agent's hooks before and after a turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.errors import PerdureError
from perdure.hooks import Hooks, Required, Seen, TurnContext, TurnEnding, call_hooks, evaluate
from perdure.runtime import Runtime
from perdure.turns.lease.tenure import TurnRow, TurnScope
from perdure.turns.outcome import Cancelled, Ending, Failed, Replied
from perdure.turns.transcript import Transcript


@dataclass(frozen=True, slots=True)
class TurnHooks:
    """The hooks of `agent` around the turn `turn`."""

    runtime: Runtime
    scope: TurnScope
    turn: TurnRow
    agent: Agent
    transcript: Transcript

    def before(self) -> Failed | None:
        """Call the `before_turn` hooks; returns a failure if a required hook rejects the turn."""
        try:
            self._call(self.agent.before_turn, self.seen())
        except PerdureError as error:
            return Failed(error)
        return None

    def after(self, ending: Ending) -> Ending:
        """Call the `after_turn` hooks; returns the ending, or a failure if a required hook rejects the reply."""
        match ending:
            case Replied(reply, data):
                text: str | None = reply.content
            case Failed(error):
                text, data = error.message, None
            case Cancelled():
                text, data = None, None
        try:
            self._call(self.agent.after_turn, TurnEnding(self.seen(), ending.status, text, data))
        except PerdureError as error:
            return Failed(error, rejected=ending.reply) if isinstance(ending, Replied) else ending
        return ending

    def make_deps(self) -> None:
        """Call the agent's function `deps`, for the tools, the hooks and the instructions of this run.

        Raises:
            Exception: raised by the function.
        """
        if self.agent.deps is not None:
            self.scope.deps = self.evaluate("deps", self.agent.deps)

    def evaluate(self, argument: str, function: Callable[[TurnContext[Any]], Any]) -> Any:
        """What a function of the agent returns for the turn.

        Raises:
            Exception: raised by the function, or because it did not return in time.
        """
        within_s = self.runtime.settings.turn.hook_timeout_s
        self.scope.step_within(within_s)
        work = partial(function, self.seen())
        return evaluate(work, f"the {argument} of {self.agent.name}", within_s, self.runtime.leaks)

    def check_output(self, value: Any) -> None:
        """Call the agent's `check_output`.

        Raises:
            ModelRetry: the model is to answer again.
            PerdureError: the function raised it, or another error, which becomes `GuardRejected`.
        """
        check = self.agent.check_output
        if check is not None:
            self._call([Required(check)], value)

    def _call(self, hooks: Hooks[Seen], seen: Seen) -> None:
        within_s = self.runtime.settings.turn.hook_timeout_s
        self.scope.step_within(within_s * len(hooks))
        call_hooks(hooks, seen, within_s, self.runtime.leaks)

    def seen(self) -> TurnContext[Any]:
        turn, zone = self.turn, self.turn.zone(self.runtime.settings.timezone)
        return TurnContext(
            user_of(turn.user_id),
            turn.session_id,
            turn.turn_id,
            turn.agent,
            turn.channel,
            self.transcript.asked,
            tenant_of(turn.user_id),
            turn.own_metadata(),
            self._began().astimezone(zone),
            zone.key,
            self.scope.deps,
        )

    def _began(self) -> datetime:
        return self.turn.started_at or self.runtime.clock.now()
