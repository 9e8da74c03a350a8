"""Writes a settled turn to working memory in Redis. The write may be lost.

Called after the commit that settles the turn, so PostgreSQL always has the turn first. The same round trip notifies
waiting gateways that the turn is settled. If Redis is unavailable, the runner waits for a bounded time and logs the
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.events.event import news_channel
from perdure.memory.redis.stream import StreamEvent, StreamEventKind
from perdure.memory.redis.working import RememberedTurn
from perdure.runtime import Runtime
from perdure.turns.lease.tenure import TurnRow
from perdure.turns.run.verdict import Verdict
from perdure.turns.transcript import Transcript


def remember(runtime: Runtime, turn: TurnRow, transcript: Transcript, verdict: Verdict, *, token: int) -> None:
    """Write the turn that `verdict` settled under the fencing token `token`, unless the turn has no messages.

    The turn's messages are its committed messages in `transcript`, followed by the messages of `verdict`. If the turn's
    channel differs from the previous turn's, this also appends a `channel_switch` event to the user's stream.
    """
    committed = [entry.to_dict(number) for number, entry in enumerate(transcript.present, 1) if entry.seq is not None]
    if runtime.redis_memory is None or not (committed or verdict.messages):
        return
    remembered = RememberedTurn.model_validate(
        {
            "turn_id": turn.turn_id,
            "seq": turn.seq,
            "token": token,
            "agent": turn.agent,
            "channel": turn.channel,
            "status": verdict.status,
            "error_code": verdict.error_code,
            "error_message": verdict.error_message,
            "settled_at": runtime.clock.now(),
            "remember": turn.additions.remember,
            "messages": [_without_prompt(each) for each in (*committed, *verdict.messages)],
        }
    )
    if turn.before.channel not in {None, turn.channel}:
        at = remembered.messages[0].created_at or remembered.settled_at
        runtime.redis_memory.stream.append(turn.user_id, StreamEvent(StreamEventKind.CHANNEL_SWITCH, turn.channel, at))
    settled = news_channel(runtime.settings.redis_prefix), f"s {turn.turn_id.hex}"
    runtime.redis_memory.working.remember_turn(turn.session_id, remembered, settled)


def _without_prompt(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without the record of its prompt, which only PostgreSQL keeps."""
    return {name: value for name, value in message.items() if name != "prompt"}
