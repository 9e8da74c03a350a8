"""The running summary of a session: what the prompts no longer show of its beginning.

A prompt has the session's newest turns. They leave it in blocks, about half of what fits. Each block is summarised in
the background while the prompts still show it, so the summary is ready when the block leaves:

    the prompts are half full    the turn plans the next block: all earlier turns           (`KEEP`)
    in the background            a worker summarises it, together with the summary so far   (`summarise_due`)
    the prompts are full         the turn lets the block leave, and plans the next one      (`KEEP`)

If a block leaves before it has a summary, the turn adds an extract of it to the summary so far. The next block's
summary then includes it.

A block costs one call of the model. The call runs between two statements: the first claims the block, the second writes
the summary on the condition that the block is still the claimed one. After a crash between them, the claim expires and
the call is repeated; the row is the same. The row belongs to its session, and is erased with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Row

from perdure.clock import Clock
from perdure.database.engine import Database
from perdure.errors import OF_INPUT, PerdureError, loggable
from perdure.models.protocol import Message, Model, ModelCall, Role
from perdure.sessions import running_queries as queries
from perdure.sessions.summary import MAX_SUMMARY_CHARS, summarise
from perdure.text.quoting import label_lines
from perdure.text.untrusted import cut, storable

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""The maximum number of attempts to summarise a block. If all fail, the block leaves with an extract."""

BATCH = 8
"""Maximum blocks that one round claims, which are summarised concurrently."""

_LINE_CHARS = 160
_MOST_MESSAGES = 400
_MESSAGE_CHARS = 4_000
_PAUSE_S = 15
_LEASE_MARGIN_S = 30
_LEFT_OUT = "[…]"


@dataclass(frozen=True, slots=True)
class Running:
    """A session's running summary: `text` covers the messages up to `to_seq`.

    `next_text` is the summary of the messages up to `next_seq`, if they are planned to leave the prompts next and the
    background has summarised them. `extractive`: a part of `text` is an extract.
    """

    to_seq: int = 0
    text: str = ""
    next_seq: int | None = None
    next_text: str | None = None
    extractive: bool = False


def extended(text: str, said: Iterable[Message]) -> str:
    """The summary `text` with an extract of further messages: a line for each.

    If it gets too long, the middle is left out, so that the beginning of the conversation stays.
    """
    spoken = (each for each in said if each.role in {Role.USER, Role.ASSISTANT} and each.content.strip())
    lines = [label_lines(each.role, cut(" ".join(each.content.split()), _LINE_CHARS)) for each in spoken]
    whole = storable("\n".join([*([text] if text else []), *lines]))
    if len(whole) <= MAX_SUMMARY_CHARS:
        return whole
    half = (MAX_SUMMARY_CHARS - len(_LEFT_OUT)) // 2 - 1
    beginning = whole[:half].replace(f"\n{_LEFT_OUT}", "")
    return f"{beginning}\n{_LEFT_OUT}\n{whole[-half:]}"


def summarise_due(
    database: Database, clock: Clock, model: Model, timeout_s: float, go_on: Callable[[], bool] = lambda: True
) -> int:
    """Summarise the blocks that wait for it, at most `BATCH` at a time; returns the number of summaries written.

    Raises:
        Unavailable: the database cannot be reached; the claims expire.
    """
    lease_s = timeout_s + _LEASE_MARGIN_S
    furthest_s = max(lease_s, _PAUSE_S * 2**MAX_ATTEMPTS)
    given = {"most": BATCH, "lease_s": lease_s, "furthest_s": furthest_s, "max_attempts": MAX_ATTEMPTS}
    written = 0
    with ThreadPoolExecutor(BATCH, thread_name_prefix="perdure-summaries") as threads:
        while go_on() and (claimed := database.run(queries.CLAIM, given)):
            written += sum(threads.map(partial(_summarise, database, clock, model, timeout_s), claimed))
            if len(claimed) < BATCH:
                break
    return written


def _summarise(database: Database, clock: Clock, model: Model, timeout_s: float, claimed: Row[Any]) -> bool:
    block = {"session_id": claimed.session_id, "to_seq": claimed.to_seq, "next_seq": claimed.next_seq}
    # The prompts of a session without a row did not show its beginning when its first block left, as those of a fork.
    after, so_far = (claimed.to_seq, claimed.summary) if claimed.from_seq == 1 else (0, "")
    given = {**block, "after": after, "most": _MOST_MESSAGES, "most_chars": _MESSAGE_CHARS}
    rows = database.run(queries.BLOCK, given)
    said = [Message(Role(row.role), row.content) for row in reversed(rows)]
    try:
        made = summarise(model, ModelCall(clock, timeout_s), said, so_far=so_far)
    except PerdureError as error:
        log.warning("a part of session %s could not be summarised: %s", claimed.session_id, loggable(error))
        given_up = isinstance(error, OF_INPUT)
        outcome = {"given_up": given_up, "pause_s": _PAUSE_S, "max_attempts": MAX_ATTEMPTS}
        database.run(queries.POSTPONE, {**block, **outcome})
        return False
    return bool(database.run(queries.STORE, {**block, "summary": made.text}))
