"""Calls the agent's hooks and guards before and after a turn.

What they change is the turn's from then on: the user's text in the transcript, and the text of the reply.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

from perdure.access.tenants import tenant_of, user_of
from perdure.agents import Agent
from perdure.errors import GuardRejected, PerdureError
from perdure.guards import Guard, Refuse, Replace, Verdict, judge
from perdure.hooks import REFUSED, Hooks, Seen, TurnContext, TurnEnding, call_hooks, evaluate
from perdure.models.protocol import Usage
from perdure.runtime import Runtime
from perdure.text.untrusted import storable
from perdure.turns.lease.tenure import TurnRow, TurnScope
from perdure.turns.outcome import Cancelled, Ending, Failed, Replied
from perdure.turns.transcript import Transcript

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnHooks:
    """The hooks of `agent` around the turn `turn`."""

    runtime: Runtime
    scope: TurnScope
    turn: TurnRow
    agent: Agent
    transcript: Transcript

    def before(self) -> Failed | None:
        """Call the `before_turn` hooks, then the input guards that do not run in parallel.

        Returns a failure if a required hook or a guard rejects the turn.
        """
        try:
            for hook in self.agent.before_turn:
                self._replace_asked(self._call([hook], self.seen()).text)
            for each in self.agent.guards:
                if not each.parallel:
                    verdict = self._judge_next(each, self.transcript.asked, stopping=self.scope.stopping)
                    if verdict.usage is not None:
                        self.transcript.charge(verdict.usage)
                    self._replace_asked(allowed(verdict, self.transcript.asked))
        except PerdureError as error:
            return Failed(error)
        return None

    def after(self, ending: Ending) -> Ending:
        """Call the output guards on a reply, then the `after_turn` hooks.

        Returns the ending, with the reply as they changed it, or a failure if a guard or a required hook rejects it.
        """
        if isinstance(ending, Replied):
            ending = self._judged(ending)
        match ending:
            case Replied(reply, data):
                text: str | None = reply.content
            case Failed(error):
                text, data = error.message, None
            case Cancelled():
                text, data = None, None
        try:
            shown = self._call(self.agent.after_turn, TurnEnding(self.seen(), ending.status, text, data))
            return self._with_reply(ending, shown.reply or "") if isinstance(ending, Replied) else ending
        except PerdureError as error:
            return ending.refused(error) if isinstance(ending, Replied) else ending

    def _judged(self, ending: Replied) -> Replied | Failed:
        """Call the output guards."""
        try:
            for each in self.agent.reply_guards:
                verdict = self._judge_next(each, ending.reply.content)
                if verdict.usage is not None:
                    ending = charged(ending, verdict.usage)
                ending = self._with_reply(ending, allowed(verdict, ending.reply.content))
        except PerdureError as error:
            return ending.refused(error)
        return ending

    def screen(self, text: str, spend: Callable[[Usage], None]) -> str:
        """What the input guards let pass of the user's answer to a question. `spend` counts the tokens of each.

        All guards judge it, one after the other, because a model reads it next.

        Raises:
            PerdureError: a guard refuses the answer.
        """
        for each in self.agent.guards:
            verdict = self._judge_next(each, text, stopping=self.scope.stopping)
            if verdict.usage is not None:
                spend(verdict.usage)
            text = storable(allowed(verdict, text))
        return text

    def _judge_next(self, guard: Guard, text: str, *, stopping: Event | None = None) -> Verdict:
        """Judge in the turn's thread, as a step of the turn; see `judge`."""
        self.scope.step_within(self.guard_s(guard))
        return self.judge(guard, text, stopping=stopping)

    def judge(self, guard: Guard, text: str, *, stopping: Event | None = None) -> Verdict:
        """The verdict of a guard on `text`, within its time limit and that of the turn. Any thread may call this.

        Raises:
            PerdureError: see `guards.judge`.
        """
        return judge(guard, text, self.seen(), self.guard_s(guard), self.runtime.leaks, stopping=stopping)

    def guard_s(self, guard: Guard) -> float:
        """The seconds that a guard has from now."""
        limits = self.runtime.settings.turn
        left_s = (self.agent.timeout_s or limits.timeout_s) - self.scope.spent_s
        return max(min(guard.timeout_s or limits.hook_timeout_s, left_s), 0.001)

    def _replace_asked(self, text: str) -> None:
        if text != self.transcript.asked:
            self.transcript.replace_asked(storable(text))

    def _with_reply(self, ending: Replied, text: str) -> Replied:
        """The ending with another text of the reply, and with the data that the text means.

        Raises:
            GuardRejected: the text is empty, or the agent has an output, and the text does not fit it.
        """
        reply, data, output = ending.reply, ending.data, self.agent.output_type
        if text == reply.content:
            return ending
        if not text.strip():
            log.warning("turn %s: a hook or a guard replaced its reply with an empty text", reply.turn_id)
            raise GuardRejected(REFUSED)
        if output is not None or data is not None:
            try:
                data = json.loads(text) if output is None else output.to_json(output.read(text), text)
            except (ValueError, RecursionError, PerdureError) as error:
                log.warning("turn %s: a hook or a guard replaced its reply with no output of its agent", reply.turn_id)
                raise GuardRejected(REFUSED) from error
        # The provider's opaque parts belong to the text that it sent.
        opaque = None if ending.is_step else reply.opaque
        return replace(ending, reply=replace(reply, content=storable(text), opaque=opaque), data=data)

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
        if check is None:
            return
        within_s = self.runtime.settings.turn.hook_timeout_s
        self.scope.step_within(within_s)
        try:
            evaluate(partial(check, value), f"the check_output of {self.agent.name}", within_s, self.runtime.leaks)
        except PerdureError:
            raise
        except Exception as error:
            raise GuardRejected(REFUSED) from error

    def _call(self, hooks: Hooks[Seen], seen: Seen) -> Seen:
        within_s = self.runtime.settings.turn.hook_timeout_s
        self.scope.step_within(within_s * len(hooks))
        return call_hooks(hooks, seen, within_s, self.runtime.leaks)

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
            (turn.started_at or self.runtime.clock.now()).astimezone(zone),
            zone.key,
            self.scope.deps,
        )


def allowed(verdict: Verdict, text: str) -> str:
    """The text that the verdict lets pass in place of `text`.

    Raises:
        GuardRejected: the verdict refuses it.
    """
    if isinstance(verdict, Refuse):
        raise GuardRejected(storable(verdict.message))
    return verdict.text if isinstance(verdict, Replace) else text


def charged(ending: Replied, usage: Usage) -> Replied:
    """The ending with the tokens of an output guard, counted with the reply."""
    used = ending.reply.usage
    return replace(ending, reply=replace(ending.reply, usage=usage if used is None else used + usage))
