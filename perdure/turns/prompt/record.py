"""The record of a prompt, which is stored with the reply to it (`messages.prompt`).

A record has references and no text: ids of memories, cases, sessions and messages, scores, tokens, and digests. Erasing
or forgetting what it refers to leaves nothing of it, and erasing the reply erases the record. `turns.prompts` puts the
texts together again, and notices by the digests what has changed since.

    {agent, fingerprint, release, model, settings,
     instructions: {sha256, tokens, room},
     is_noted, parts: [{name, ids, scores, tokens, budget, digest}],     quoted parts, in the order of the prompt
     history: {ranges: [[from, to]], budget},                  `seq` of the earlier turns' messages
     tools: {names, tokens, sha256}}

The record of a later reply of the turn has only the members that differ from those of the reply before it, and
`as_before`. A record costs no statement: it is a column of the message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from perdure.agents import Agent
from perdure.models.protocol import ToolSchema
from perdure.models.settings import SECRET
from perdure.text.tokens import estimate_tokens
from perdure.turns.prompt.parts import Part
from perdure.turns.transcript import Entry

AS_BEFORE = "as_before"

RELEASE = version("perdure")

_DIGEST_CHARS = 12
_SCORE_DIGITS = 4


def digest(text: str) -> str:
    """A short digest, by which a change of a text is noticed."""
    return sha256(text)[:_DIGEST_CHARS]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def of_instructions(text: str, room: int | None) -> dict[str, Any]:
    """The record of an agent's instructions, as they were sent: cut to `room` tokens; `None`: no text is stored."""
    return {"sha256": sha256(text), "tokens": estimate_tokens(text), "room": room}


def of_part(part: Part, text: str) -> dict[str, Any]:
    """The record of a quoted part, whose whole text in the prompt is `text`."""
    told = part.told()
    scores = [round(each, _SCORE_DIGITS) for each in part.scores[: len(told)]]
    return {
        "name": part.name,
        "tokens": estimate_tokens(text),
        "budget": part.budget,
        "digest": digest("\n".join(told)),
        **({"ids": list(part.ids[: len(told)])} if part.ids else {}),
        **({"scores": scores} if scores else {}),
    }


def of_call(
    agent: Agent,
    model: str,
    settings: Mapping[str, Any],
    *,
    instructions: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    earlier: Iterable[Entry],
    budget: int,
    tools: Sequence[ToolSchema],
    is_noted: bool = True,
) -> dict[str, Any]:
    """The record of the prompt of one model call.

    `earlier` are the messages of the turns before. `is_noted`: perdure's note stands before the turn's message.
    """
    schemas = json.dumps([[each.name, each.description, each.parameters] for each in tools], sort_keys=True)
    return {
        "agent": agent.name,
        "fingerprint": agent.fingerprint,
        "release": RELEASE,
        "model": model,
        "settings": {name: None if name in SECRET else value for name, value in settings.items()},
        "instructions": dict(instructions),
        "parts": [dict(each) for each in parts],
        "is_noted": is_noted,
        "history": {"ranges": _ranges(entry.seq for entry in earlier if entry.seq is not None), "budget": budget},
        "tools": {
            "names": [each.name for each in tools],
            "tokens": sum(each.tokens for each in tools),
            "sha256": sha256(schemas) if tools else None,
        },
    }


def shortened(record: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is stored of `record`, if `before` is the record of the turn's reply before it."""
    if before is None:
        return dict(record)
    return {AS_BEFORE: True, **{name: value for name, value in record.items() if before.get(name) != value}}


def whole(stored: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The record that `shortened` made."""
    given = {name: value for name, value in stored.items() if name != AS_BEFORE}
    return {**(before or {}), **given} if stored.get(AS_BEFORE) else given


def _ranges(seqs: Iterable[int]) -> list[list[int]]:
    """Increasing numbers as ranges.

    >>> _ranges([1, 2, 3, 7, 9, 10])
    [[1, 3], [7, 7], [9, 10]]
    """
    found: list[list[int]] = []
    for seq in seqs:
        if found and seq == found[-1][1] + 1:
            found[-1][1] = seq
        else:
            found.append([seq, seq])
    return found
