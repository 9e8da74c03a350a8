"""Finds cases for a prompt, for a user, and for an administrator.

A prompt contains only cases whose cosine with the question reaches a minimum, the similarity floor. The floor depends
on the embedder: the cosine of unrelated texts is about 0 with some embedders and 0.8 with others. The floors for the
embedders `hash`, `static` and all-MiniLM-L6-v2 were measured with `tests/casebank/questions.py`: for each question, all
cases of other topics are below the floor. The floors for other embedders are high estimates. docs/casebank.md lists the
measurements.

Each function that runs a statement raises `Unavailable` if the database cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perdure.access.tenants import UserKey, tenant_of
from perdure.casebank.search import FoundCase, Within, search, search_for_user
from perdure.database.engine import Database
from perdure.models.embedders.protocol import Embedder, Vector, embedded_text
from perdure.models.protocol import ModelCall
from perdure.settings import CasebankSettings, CaseScope
from perdure.text.patterns import compiled

_DEFAULTS = (
    (compiled(r"hash:(\d{1,2}|1\d\d)$"), 0.6),
    (compiled(r"hash:\d+$"), 0.5),
    (compiled(r"static:384$"), 0.55),
    (compiled(r"(sentence-transformers|fastembed):(.*/)?all-MiniLM-L6-v2/?$", ignore_case=True), 0.6),
    (compiled(r"openai:(.*/)?text-embedding-3-(small|large)$"), 0.6),
)

_EQUAL = 4
"""How many times as many cases as a prompt takes are read for it, because some may be equal."""

_UNKNOWN = 0.85
"""The floor for other embedders. Some (E5, text-embedding-ada-002) give unrelated texts a cosine of 0.8."""


def least_similarity(embedder: str, setting: float | None) -> float:
    """The similarity floor: `setting` or, if `setting` is `None`, the default for the embedder named `embedder`."""
    if setting is not None:
        return setting
    return next((least for pattern, least in _DEFAULTS if pattern.match(embedder)), _UNKNOWN)


@dataclass(frozen=True, slots=True)
class CaseLookup:
    """Searches the cases of one installation. `banks` returns the banks that agents use. Thread-safe."""

    database: Database
    embedder: Embedder
    settings: CasebankSettings
    banks: Callable[[], Sequence[str]]

    def for_prompt(
        self, user: UserKey, question: str, k: int, *, bank: str, embedder: Embedder, call: ModelCall
    ) -> list[FoundCase]:
        """At most `k` cases in `bank` for the prompt of `user` (a user key), nearest first. Equal ones count as one.

        Searches only those cases of the user's tenant that `PERDURE_CASEBANK__SCOPE` allows. Returns no case below the
        similarity floor (`PERDURE_CASEBANK__MIN_SIMILARITY`).

        Raises:
            PerdureError: the question could not be embedded.
        """
        vector = embedder.embed([embedded_text(question)], call)[0]
        least = least_similarity(embedder.name, self.settings.min_similarity)
        found = self._visible(user, vector, embedder.name, _EQUAL * k, banks=[bank], least=least)
        return _without_equals(found)[:k]

    def visible_to(self, user: UserKey, question: str, k: int, *, bank: str | None = None) -> list[FoundCase]:
        """The `k` nearest active cases that `user` (a user key) may see, including cases below the similarity floor.

        Searches `bank` or, if `bank` is `None`, the banks of all agents. Returns an empty list if no agent uses `bank`.

        Raises:
            PerdureError: the question could not be embedded.
        """
        vector = self.embedder.embed([embedded_text(question)])[0]
        banks = [each for each in self.banks() if bank in {None, each}]
        return self._visible(user, vector, self.embedder.name, k, banks=banks)

    def nearest(
        self, question: str, k: int, within: Within, *, bank: str | None = None, include_archived: bool = False
    ) -> list[FoundCase]:
        """The `k` nearest cases that `within` selects, for an administrator. Includes cases below the similarity floor.

        Raises:
            PerdureError: the question could not be embedded.
        """
        vector = self.embedder.embed([embedded_text(question)])[0]
        banks = None if bank is None else [bank]
        name = self.embedder.name
        return search(self.database, vector, name, k, within, banks=banks, include_archived=include_archived)

    def _visible(
        self, user: UserKey, vector: Vector, embedder: str, k: int, *, banks: Sequence[str], least: float | None = None
    ) -> list[FoundCase]:
        """The `k` nearest active cases in `banks` that `user` may see under `PERDURE_CASEBANK__SCOPE`."""
        if self.settings.scope is CaseScope.ALL:
            within = Within(tenant_of(user))
            return search(self.database, vector, embedder, k, within, banks=banks, least=least)
        return search_for_user(self.database, user, vector, embedder, k, banks=banks, least=least)


def _without_equals(found: Sequence[FoundCase]) -> list[FoundCase]:
    """The first of `found` with each question and answer. Blanks and case make no difference."""
    first: dict[tuple[str, ...], FoundCase] = {}
    for each in found:
        first.setdefault(tuple(" ".join(text.split()).casefold() for text in (each.query, each.response_text)), each)
    return list(first.values())
