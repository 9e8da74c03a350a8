"""Sequences of two statements of a user, made by hand, and the models that extract them: a good and a bad one.

The later statement of a sequence changes the earlier one, says the same in other words (a paraphrase), or only looks
alike. The sequences are in `benchmarks/data/memory_changes.json`, in six languages, and in `memory_changes_2.json`, in
nine, with other words, domains and registers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perdure.models.protocol import ModelCall, ModelReply, ModelRequest
from tests.memory.archive import Archive, answer, memory
from tests.repository.source import ROOT

PARAPHRASE, LOOK_ALIKE = "paraphrase", "look-alike"


@dataclass(frozen=True)
class Sequence2:
    """Two statements. `attribute` is that of the changed or repeated memory, empty for a look-alike."""

    language: str
    kind: str
    attribute: str
    earlier: str
    later: str

    @property
    def is_change(self) -> bool:
        return self.kind not in (PARAPHRASE, LOOK_ALIKE)


def _read(name: str) -> list[Sequence2]:
    found = json.loads((ROOT / "benchmarks" / "data" / name).read_text(encoding="utf-8"))
    return [Sequence2(**each) for each in found]


SEQUENCES = _read("memory_changes.json")
OTHER_SEQUENCES = _read("memory_changes_2.json")

Decide = Callable[[Sequence2], tuple[str, bool]]
"""The decision of a model about a sequence, and whether the model tells the attribute.

Of a look-alike, a model that decides otherwise than `new` names `_SEVERAL` as the attribute of both statements.
"""

_SEVERAL = "hobby"


def good(sequence: Sequence2) -> tuple[str, bool]:
    """Decides rightly."""
    if sequence.kind == PARAPHRASE:
        return "same", True
    return ("changes" if sequence.is_change else "new"), True


def bad(sequence: Sequence2) -> tuple[str, bool]:
    """Takes each change for a repetition, each repetition for a change, and each look-alike for either."""
    if sequence.is_change:
        return "same", False
    if sequence.kind == PARAPHRASE:
        return "changes", False
    return ("same" if len(sequence.later) % 2 else "changes"), False


def bad_with_attributes(sequence: Sequence2) -> tuple[str, bool]:
    """Decides as wrongly as `bad`, and names the subject and the attribute of everything."""
    return bad(sequence)[0], True


class Extractor:
    """A model that extracts each line of the user as one memory, and decides by `decide` (`None`: not at all)."""

    name = "extractor"

    def __init__(self, sequences: Sequence[Sequence2], decide: Decide | None) -> None:
        self._by_texts = {(each.earlier, each.later): each for each in sequences}
        self._attributes = {each.earlier: each.attribute for each in sequences if each.attribute}
        self._decide = decide

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        line = request.messages[1].content.split("user: ", 1)[1]
        known = (
            [each.split(") ", 1)[1] for each in request.messages[2].content.splitlines()[1:]]
            if (len(request.messages) > 2)
            else []
        )
        return answer(memory(line, **self._more(line, known)))

    def _more(self, line: str, known: list[str]) -> dict[str, Any]:
        if self._decide is None:
            return {}
        for number, content in enumerate(known, start=1):
            sequence = self._by_texts.get((content, line))
            if sequence is not None:
                decision, tells = self._decide(sequence)
                topic = self._topic(decision, sequence.attribute) if tells else {}
                return {"decision": decision, "known": number if decision != "new" else 0, **topic}
        decision, tells = self._decide(Sequence2("", LOOK_ALIKE, "", "", ""))
        topic = self._topic(decision, self._attributes.get(line, "")) if tells else {}
        return {"decision": "new", "known": 0, **topic}

    def _topic(self, decision: str, attribute: str) -> dict[str, str]:
        named = attribute or (_SEVERAL if decision != "new" else "")
        return {"subject": "user", "attribute": named} if named else {}


@dataclass(frozen=True)
class Figures:
    """Shares of the changes that superseded and of the paraphrases that reinforced, and the sequences that went wrong.

    `reinforced`: changes that reinforced what they contradict. `touched`: look-alikes that changed or reinforced.
    """

    superseded: float
    merged: float
    reinforced: list[Sequence2]
    touched: list[Sequence2]
    missed: list[Sequence2]


def figures(archive: Archive, sequences: Sequence[Sequence2], decide: Decide | None) -> Figures:
    """Consolidate each sequence, as two sessions of a user of its own."""
    archive.limit(batch_size=10_000, min_turns=0)
    users = [f"user {number}" for number in range(len(sequences))]
    for said in ("earlier", "later"):
        for user_id, sequence in zip(users, sequences, strict=True):
            archive.ended(getattr(sequence, said), user_id=user_id, turns=1)
    counts = archive.consolidator(Extractor(sequences, decide)).batch()
    assert (counts.processed, counts.failed) == (2 * len(sequences), 0)
    rows = archive.harness.sql(
        "SELECT user_id, count(*) AS memories, sum(access_count) AS accesses, "
        "count(*) FILTER (WHERE superseded_by IS NOT NULL) AS superseded FROM memories GROUP BY user_id"
    )
    by_user = {row.user_id: row for row in rows}
    outcomes = [(sequence, by_user[user_id]) for user_id, sequence in zip(users, sequences, strict=True)]
    changes = [each for each in outcomes if each[0].is_change]
    repeated = [each for each in outcomes if each[0].kind == PARAPHRASE]
    alike = [each for each in outcomes if each[0].kind == LOOK_ALIKE]
    ended = [sequence for sequence, row in changes if row.superseded]
    merged = [sequence for sequence, row in repeated if (row.memories, row.accesses) == (1, 1)]
    return Figures(
        len(ended) / len(changes),
        len(merged) / len(repeated),
        [sequence for sequence, row in changes if row.accesses],
        [sequence for sequence, row in alike if row.accesses or row.superseded],
        [sequence for sequence, _ in (*changes, *repeated) if sequence not in (*ended, *merged)],
    )
