"""Finds duplicate cases, and decides which case of a pair absorbs the other. The result is exact.

The search is greedy. It visits the cases of a group in keeper order (`policy.keeper_order`), and compares each case
with the cases that it has kept. The first kept case whose cosine exceeds the threshold absorbs the case; a case that
none absorbs is kept. Blocks of cases are compared by a product of matrices in float32, whose rounding error is bounded.
`cosines.cosine` decides the pairs that the product finds, so the sizes of blocks do not affect the result.

Memory holds the vectors of one group's kept cases. If they take more than `_KEPT_BYTES`, the search stops keeping
cases: it compares the rest of the group with the kept cases, drops these, and begins again with the cases that are
left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from perdure.casebank.plan.cosines import Vector, cosine, has_direction
from perdure.casebank.plan.policy import Facts, Finding, Rule, keeper_order
from perdure.settings import CasebankSettings
from perdure.text import contradiction

_KEPT_BYTES = 2**30
_COLUMNS = 4_096
_READINGS = 20_000


@dataclass(frozen=True, slots=True)
class Content:
    """What is compared of a case."""

    query: str
    embedder: str | None
    vector: Vector | None


Read = Callable[[Sequence[str]], Mapping[str, Content]]
"""Reads the contents of the cases with these ids. A case that is no longer active may be missing."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that may absorb each other: their vectors have one embedder and size, and the same users see them."""

    embedder: str
    dimensions: int
    cases: list[Facts]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two cases whose cosine exceeds the threshold. The keeper absorbs the loser, unless the loser is spared."""

    keeper: Facts
    loser: Facts
    similarity: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The pairs to merge, and the pairs whose loser is spared, each with the reason."""

    absorbed: list[Pair]
    spared: list[tuple[Pair, Finding]]


def find(
    group: Group,
    read: Read,
    limits: CasebankSettings,
    protection: Callable[[Facts], Finding | None],
    on_progress: Callable[[int], None],
) -> Duplicates:
    """Find the group's duplicates. A loser for which `protection` returns a verdict is spared.

    `on_progress` is called after each piece of work with the number of cases that are finished. It may pause, or raise
    to stop the work.
    """
    absorbed = list[Pair]()
    spared = dict[str, tuple[Pair, Finding]]()
    waiting = sorted(group.cases, key=keeper_order)
    while len(waiting) > 1:
        search = _Search(group, waiting, limits, protection, spared)
        left_over = list[Facts]()
        for start in range(0, len(waiting), limits.duplicate_batch):
            block = waiting[start : start + limits.duplicate_batch]
            done = len(group.cases) - len(waiting) + start - len(left_over)
            contents = read([case.case_id for case in block])
            left_over += search.compare(block, contents, partial(on_progress, done))
        absorbed += search.absorbed
        waiting = left_over
    return Duplicates(absorbed, list(spared.values()))


class _Search:
    """Compares cases with the kept ones. The arrays have a row for each kept case, then one for each of the block."""

    def __init__(
        self,
        group: Group,
        waiting: Sequence[Facts],
        limits: CasebankSettings,
        protection: Callable[[Facts], Finding | None],
        spared: dict[str, tuple[Pair, Finding]],
    ) -> None:
        self.absorbed: list[Pair] = []
        self._group = group
        self._limits = limits
        self._protection = protection
        self._spared = spared
        self._floor = limits.duplicate_similarity - (group.dimensions + 8) * 2.0**-23  # twice the rounding error
        self._features = lru_cache(_READINGS)(contradiction.features)
        self._room = max(limits.duplicate_batch, min(len(waiting), _KEPT_BYTES // (8 * group.dimensions)))
        self._full = False
        self._kept = 0
        rows = self._room + limits.duplicate_batch
        self._cases: list[Facts] = []
        self._queries: list[str] = []
        self._vectors = np.empty((rows, group.dimensions), dtype=np.float32)
        self._units = np.empty((rows, group.dimensions), dtype=np.float32)
        self._signatures = np.zeros((rows, 3), dtype=np.int64)
        self._signed = np.zeros(rows, dtype=np.bool_)

    def compare(
        self, block: Sequence[Facts], contents: Mapping[str, Content], on_progress: Callable[[], None]
    ) -> list[Facts]:
        """Compare a block of cases with the kept ones and with each other.

        Keeps the cases that no other absorbs. If there is no room for the block, returns these cases instead; from then
        on, no more cases are kept: a later one may be a duplicate of a case that was returned.
        """
        start, stop = self._kept, self._append(block, contents)
        self._full = self._full or stop > self._room
        near = np.empty((stop - start, stop), dtype=np.bool_)
        for first in range(0, stop, _COLUMNS):
            last = min(first + _COLUMNS, stop)
            near[:, first:last] = self._units[start:stop] @ self._units[first:last].T > self._floor
            on_progress()
        near[:, start:] = False if self._full else np.tril(near[:, start:], -1)
        left = np.ones(stop, dtype=np.bool_)
        for row in np.flatnonzero(near.any(axis=1)).tolist():
            left[start + row] = not self._absorb(np.flatnonzero(near[row] & left), start + row)
        rest = np.flatnonzero(left[start:]) + start
        left_over = [self._cases[row] for row in rest.tolist()] if self._full else []
        self._keep(rest[:0] if self._full else rest)
        return left_over

    def _append(self, block: Sequence[Facts], contents: Mapping[str, Content]) -> int:
        """Append the cases that still have a vector of the group's kind; returns the number of rows in use."""
        for case in block:
            content = contents.get(case.case_id)
            if content is None or content.vector is None or content.embedder != self._group.embedder:
                continue
            if len(content.vector) != self._group.dimensions or not has_direction(content.vector):
                continue
            self._vectors[len(self._cases)] = content.vector
            self._cases.append(case)
            self._queries.append(content.query)
        wide = self._vectors[self._kept : len(self._cases)].astype(np.float64)
        self._units[self._kept : len(self._cases)] = wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
        self._signed[self._kept : len(self._cases)] = False
        return len(self._cases)

    def _keep(self, rows: NDArray[np.intp]) -> None:
        """Keep these rows of the block, and drop the others."""
        start, self._kept = self._kept, self._kept + len(rows)
        for array in (self._vectors, self._units, self._signatures, self._signed):
            array[start : self._kept] = array[rows]
        self._cases[start:] = [self._cases[row] for row in rows.tolist()]
        self._queries[start:] = [self._queries[row] for row in rows.tolist()]

    def _absorb(self, keepers: NDArray[np.intp], loser: int) -> bool:
        """Merge the loser into the first keeper that it duplicates, and return True. Spare a protected loser."""
        case = self._cases[loser]
        pair_and_verdict = self._spared.get(case.case_id)
        if pair_and_verdict is not None and pair_and_verdict[1].rule is not Rule.DIFFERENT:
            return False
        refused = pair_and_verdict is not None
        if refused:
            keepers = self._perhaps_same(keepers, loser)
        while keepers.size:
            keeper, keepers = int(keepers[0]), keepers[1:]
            difference = self._difference(keeper, loser)
            if refused and difference is not None:
                continue  # a difference from an earlier keeper is already recorded
            similarity = cosine(self._vectors[keeper], self._vectors[loser])
            if similarity <= self._limits.duplicate_similarity:
                continue
            pair = Pair(self._cases[keeper], case, similarity)
            if difference is not None:
                self._spared[case.case_id] = (pair, difference)
                refused, keepers = True, self._perhaps_same(keepers, loser)
                continue
            if (protected := self._protection(case)) is not None:
                self._spared[case.case_id] = (pair, protected)
                return False
            self._spared.pop(case.case_id, None)
            self.absorbed.append(pair)
            return True
        return False

    def _difference(self, keeper: int, loser: int) -> Finding | None:
        if not self._limits.duplicate_guard:
            return None
        keeping, losing = (self._features(self._queries[row]) for row in (keeper, loser))
        found = contradiction.compare(keeping, losing)
        return None if found is None else Finding(Rule.DIFFERENT, str(found))

    def _perhaps_same(self, keepers: NDArray[np.intp], loser: int) -> NDArray[np.intp]:
        """The keepers whose questions do not certainly differ from the loser's in numbers, negations or a name.

        Vectorised, because a thousand questions that differ only in a number make half a million pairs.
        """
        for row in (*keepers[~self._signed[keepers]].tolist(), loser):
            read = self._features(self._queries[row])
            self._signatures[row] = read.fingerprint, read.name_bits, read.word_bits
            self._signed[row] = True
        fingerprints, names, words = self._signatures[keepers].T
        fingerprint, name_bits, word_bits = self._signatures[loser]
        same: NDArray[np.bool_] = (fingerprints == fingerprint) & (names & ~word_bits == 0) & (name_bits & ~words == 0)
        return keepers[same]
