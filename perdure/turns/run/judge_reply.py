"""Judges whether a reply without tool calls is an output of its agent."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from perdure.errors import ContentFiltered, InvalidResponse, ModelRetry, PerdureError, loggable
from perdure.models import endings
from perdure.output import MOST_REPAIRS, OutputType
from perdure.turns.additions import RequestedOutput
from perdure.turns.outcome import Failed, Replied
from perdure.turns.run.turn_hooks import TurnHooks
from perdure.turns.transcript import Entry, rejected

log = logging.getLogger(__name__)


def judge(reply: Entry, hooks: TurnHooks) -> Replied | Failed | Entry:
    """The turn's end with the reply, or the entry of a rejected reply, after which the model answers again.

    The words of a model that refuses are no output, whatever its type, and the model is not asked again.
    """
    transcript = hooks.transcript
    output = hooks.agent.output_type or hooks.turn.additions.output_type
    if output is not None and reply.stop_reason == endings.REFUSAL:
        return Failed(ContentFiltered("The model refused to answer this."), rejected=(reply,))
    try:
        value = reply.content if output is None else output.read(reply.content)
        hooks.check_output(value)
        return Replied(reply) if output is None else _with_data(reply, output, value)
    except ModelRetry as error:
        if sum(entry.is_rejected for entry in transcript.present) < MOST_REPAIRS:
            log.info("turn %s: the model's reply is no output of its agent: %s", reply.turn_id, loggable(error))
            return rejected(reply, error.message)
        times = MOST_REPAIRS + 1
        stopped = InvalidResponse(f"The model's answer could not be used {times} times, so I stopped.")
        stopped.__cause__ = error
        return Failed(stopped, rejected=(reply,))
    except PerdureError as error:
        return Failed(error, rejected=(reply,))


def _with_data(reply: Entry, output: OutputType | RequestedOutput, value: Any) -> Replied:
    """The turn's end. Its text is the JSON of its data: what the model wrote, unless that has anything else."""
    data = output.to_json(value, reply.content)
    try:
        if json.loads(reply.content) == data:
            return Replied(reply, data)
    except (ValueError, RecursionError):
        pass
    # The provider's opaque parts belong to the text that it sent.
    return Replied(replace(reply, content=json.dumps(data, ensure_ascii=False), opaque=None), data)
