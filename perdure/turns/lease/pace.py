"""How many turns that waited for a model return to it at once.

A model that has just recovered gets few turns. The number doubles whenever as many turns were answered, as long as the
model then answers more turns per second than before. Beyond the rate that the model takes, the number stays. It is
halved when the model fails again. Each model has its own number, so that a failing model does not delay the turns of
another one. The rounds of the sweeper pass the numbers on in a row of `sweeps`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure.database.engine import Executor, as_json
from perdure.turns.lease import queries

FIRST = 10
"""The number of turns that return at once to a model of which nothing is known."""

MOST = 500

_FASTER = 1.5
"""The growth of the rate of answers that justifies a larger number."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The pace of one model's turns.

    Attributes:
        most: The number of returned turns that the model may have at once.
        woken: The sessions whose turns were returned and are not answered yet.
        answered: The number of turns that were answered since `since`, a time in seconds.
        rate: The answered turns per second at the last change of `most`.
    """

    most: int = FIRST
    woken: tuple[UUID, ...] = ()
    answered: int = 0
    since: float = 0.0
    rate: float = 0.0

    @property
    def room(self) -> int:
        """The number of turns that may return now."""
        return max(self.most - len(self.woken), 0)

    def after(
        self, failed: Collection[UUID], answered: Collection[UUID], unanswered: Collection[UUID], now: float
    ) -> Pace:
        """The pace after the model has failed for the turns `failed`, and answered `answered`.

        It still has `unanswered`. The other turns have left it, which says nothing about it.
        """
        left = tuple(each for each in self.woken if each in unanswered)
        if any(each in failed for each in self.woken):
            return Pace(max(self.most // 2, 1), left, since=now)
        number = self.answered + sum(each in answered for each in self.woken)
        if number < self.most:
            return replace(self, woken=left, answered=number)
        elapsed_s = now - self.since
        rate = number / elapsed_s if elapsed_s > 0 else math.inf
        most = min(self.most * 2, MOST) if rate > self.rate * _FASTER else self.most
        return Pace(most, left, 0, now, rate if math.isfinite(rate) else 0.0)

    def wake(self, sessions: Iterable[UUID], now: float) -> Pace:
        """The pace after the turns of `sessions` have returned to the model, or were woken again after their return."""
        added = (each for each in sessions if each not in self.woken)
        return replace(self, woken=(*self.woken, *added), since=self.since if self.woken else now)

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Pace:
        """Parse the output of `record`."""
        woken = tuple(map(UUID, record["woken"]))
        return cls(record["most"], woken, record["answered"], record["since"], record["rate"])

    def to_dict(self) -> dict[str, Any]:
        """The pace as a JSON object."""
        return {
            "most": self.most,
            "woken": [str(each) for each in self.woken],
            "answered": self.answered,
            "since": self.since,
            "rate": self.rate,
        }


class Paces:
    """The paces of all models, by the models' names, during one round. `stored` is what the last round left."""

    def __init__(self, database: Executor, stored: Mapping[str, Any] | None) -> None:
        self._database = database
        try:
            self._paces = {model: Pace.parse(record) for model, record in (stored or {}).items()}
        except (AttributeError, LookupError, TypeError, ValueError):  # of another release: the paces begin anew
            self._paces = {}
        self._stored = dict(self._paces)

    def rooms(self) -> str:
        """The number of turns that may return now to each model with a pace, as a JSON object."""
        return as_json({model: pace.room for model, pace in self._paces.items()})

    def observe(self, now: datetime) -> None:
        """Find out which returned turns were answered, and for which the model failed again."""
        woken = [each for pace in self._paces.values() for each in pace.woken]
        rows = self._database.run(queries.RETURNED, {"session_ids": woken}) if woken else ()
        failed = {row.session_id for row in rows if row.failed}
        answered = {row.session_id for row in rows if row.answered}
        unanswered = {row.session_id for row in rows if row.unanswered}
        seen = now.timestamp()
        self._paces = {
            model: pace.after(failed, answered, unanswered, seen) for model, pace in self._paces.items() if pace.woken
        }

    def wake(self, woken: Mapping[str, Collection[UUID]], now: datetime) -> bool:
        """Record the sessions whose turns return, by model; returns whether a pace has limited their number.

        Stores the paces for the next round if they changed.
        """
        for model, sessions in woken.items():
            self._paces[model] = self._paces.get(model, Pace()).wake(sessions, now.timestamp())
        if self._paces != self._stored:
            self._stored = dict(self._paces)
            kept = as_json({model: pace.to_dict() for model, pace in self._paces.items()})
            self._database.run(queries.KEEP_PACES, {"paces": kept})
        return any(pace.room == 0 for pace in self._paces.values())
