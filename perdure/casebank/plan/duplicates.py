"""Duplicates: which case absorbs which, exactly, in memory that does not grow with their pairs.

Greedy, in keeper order: each case that is left absorbs those left that are nearer to it than
the threshold. Cases are taken a batch at a time, and a batch is compared with all later ones
block by block: first by sketches, then what is left by the vectors themselves.

A sketch is a vector's part in a few directions and the length of the rest. By Cauchy and
Schwarz the inner product of two sketches is at least that of the vectors, so what it rules
out is ruled out for certain, for a sixth of the work or less. The directions are those in
which a sample of the cases extends most; which ones they are decides how fast this is and
never what is found. What remains near the threshold is decided by `cosines.cosine`, which
knows nothing of blocks: the result is a function of the cases alone.

Only cases with the same readers are compared: a merge would take a case from the users who may see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perdure.casebank.plan.cosines import Vector, cosine
from perdure.casebank.plan.packed_cases import Roster
from perdure.casebank.plan.policy import Facts, Rule, Verdict
from perdure.casebank.plan.spool import Rows, Texts
from perdure.settings import CasebankSettings
from perdure.text import contradiction

Step = Callable[[int, int], None]
"""Called after each piece of work with what is done and the total: to report, to rest, to stop."""

_BLOCK = 4_096
_VERIFIED = 512
_SAMPLE = 512
_FEWEST_DIRECTIONS = 64
_DIRECTIONS_IN = 6
"""A sketch has one direction for so many dimensions."""

_SKETCH_ERROR = 1e-4
"""By which float32 may put the product of two sketches too low, with much to spare."""

_PRODUCT_ERROR = 1e-9
"""The same for the product of two unit vectors in float64."""

_READINGS = 20_000


@dataclass(frozen=True, slots=True)
class Pair:
    """A case and the one that absorbs it, or would: by their numbers in the group's roster."""

    keeper: int
    loser: int
    similarity: float


@dataclass(frozen=True, slots=True)
class Found:
    """What absorbs what, in keeper order, and which pairs were left as they are, and why."""

    absorbed: list[Pair]
    spared: list[tuple[Pair, Verdict]]


class Group:
    """Cases whose vectors may be compared: of one embedder and size. Holds files; use it in a `with`."""

    def __init__(self, dimensions: int) -> None:
        self.roster = Roster()
        self._files = ExitStack()
        self._vectors = self._files.enter_context(Rows(dimensions))
        self._texts = self._files.enter_context(Texts())
        self._pending: list[Vector] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, case: Facts, query: str, vector: Vector, readers: str | None = None) -> None:
        """Add a case whose vector has a direction. It is compared with the cases of the same readers only."""
        self.roster.append(case, readers)
        self._texts.append(query)
        self._pending.append(vector)
        if len(self._pending) == _VERIFIED:
            self._flush()

    def duplicates(self, limits: CasebankSettings, protection: Callable[[Facts], Verdict | None], step: Step) -> Found:
        """Who absorbs whom. A loser that `protection` speaks for is left as it is."""
        self._flush()
        with ExitStack() as files:
            ordered = _Ordered(self.roster, self._vectors, self._texts, files, step)
            return _Search(ordered, limits, protection, step).run()

    def _flush(self) -> None:
        if self._pending:
            self._vectors.append(np.stack(self._pending))
            self._pending.clear()


class _Ordered:
    """A group in keeper order. Positions, from here on, are places in that order."""

    def __init__(self, roster: Roster, vectors: Rows, texts: Texts, files: ExitStack, step: Step) -> None:
        self.numbers = roster.keeper_order()
        self.readers = roster.readers()[self.numbers]
        self._roster = roster
        self._texts = texts
        self._directions = _directions(vectors)
        self.vectors = files.enter_context(Rows(vectors.width))
        self.sketches = files.enter_context(Rows(_sketch_width(vectors.width)))
        for start in range(0, len(roster), _VERIFIED):
            self._copy(vectors, start)
            step(0, len(roster))

    def __len__(self) -> int:
        return len(self.numbers)

    def facts(self, position: int) -> Facts:
        """What the policy knows of the case there."""
        return self._roster[int(self.numbers[position])]

    def reading(self, position: int) -> contradiction.Features:
        """Its question, read for what decides its sense."""
        return contradiction.features(self._texts[int(self.numbers[position])])

    def units(self, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """`(k, d)` vectors of length 1."""
        return _unit(self.vectors.take(positions))

    def _copy(self, vectors: Rows, start: int) -> None:
        numbers = self.numbers[start : start + _VERIFIED]
        block = vectors.take(numbers)
        self.vectors.append(block)
        self.sketches.append(_sketched(_unit(block), self._directions))


class _Keepers:
    """The cases of a batch that may absorb others."""

    def __init__(self, ordered: _Ordered, positions: NDArray[np.intp]) -> None:
        self.positions = positions
        self.sketches = ordered.sketches.take(positions)
        self._ordered = ordered

    @cached_property
    def units(self) -> NDArray[np.float64]:
        """Their vectors, of length 1; needed only where a sketch does not decide."""
        return self._ordered.units(self.positions)


class _Search:
    """One pass over a group."""

    def __init__(
        self,
        ordered: _Ordered,
        limits: CasebankSettings,
        protection: Callable[[Facts], Verdict | None],
        step: Step,
    ) -> None:
        self._cases = ordered
        self._limits = limits
        self._threshold = limits.duplicate_similarity
        self._protection = protection
        self._step = step
        self._left = np.ones(len(ordered), dtype=np.bool_)
        self._absorbed: list[Pair] = []
        self._spared: dict[int, tuple[Pair, Verdict]] = {}
        self._reading = lru_cache(_READINGS)(ordered.reading)
        self._senses = _Senses(len(ordered), self._reading)
        self._refused = np.zeros(len(ordered), dtype=np.bool_)
        self._protected = np.zeros(len(ordered), dtype=np.bool_)

    def run(self) -> Found:
        """All of it."""
        for batch in self._batches():
            keepers = _Keepers(self._cases, self._among(batch))
            for start in range(int(batch[-1]) + 1, len(self._cases), _BLOCK):
                self._against(keepers, start, min(start + _BLOCK, len(self._cases)))
                self._step(int(batch[0]), len(self._cases))
        spared = [self._spared[position] for position in sorted(self._spared) if self._left[position]]
        place = np.empty(len(self._cases), dtype=np.intp)
        place[self._cases.numbers] = np.arange(len(self._cases))
        self._absorbed.sort(key=lambda pair: (place[pair.keeper], place[pair.loser]))
        return Found(self._absorbed, spared)

    def _batches(self) -> Iterator[NDArray[np.intp]]:
        """The positions that are left, from the first on, so many at a time."""
        after = 0
        while (ahead := np.flatnonzero(self._left[after:])[: self._limits.duplicate_batch]).size:
            batch = ahead + after
            yield batch
            after = int(batch[-1]) + 1

    def _among(self, batch: NDArray[np.intp]) -> NDArray[np.intp]:
        """Let the batch absorb of itself; those that are left of it."""
        units = self._cases.units(batch)
        near = np.triu(units @ units.T > self._threshold - _PRODUCT_ERROR, k=1) & self._same_readers(batch, batch)
        for at in np.flatnonzero(near.any(axis=0) & ~self._protected[batch]).tolist():
            earlier, loser = batch[:at][near[:at, at] & self._left[batch[:at]]], batch[at : at + 1]
            worth = self._worth_deciding(np.ones((len(earlier), 1), dtype=np.bool_), earlier, loser)
            self._decide(earlier[worth[:, 0]], int(loser[0]))
        return batch[self._left[batch]]

    def _against(self, keepers: _Keepers, start: int, stop: int) -> None:
        """Let the keepers absorb of a block of later cases."""
        open_ = self._left[start:stop] & ~self._protected[start:stop]
        if not open_.any():
            return
        products = keepers.sketches @ self._cases.sketches.block(start, stop).T
        columns = np.flatnonzero((products.max(axis=0) > self._threshold - _SKETCH_ERROR) & open_)
        for at in range(0, len(columns), _VERIFIED):
            losers = start + columns[at : at + _VERIFIED]
            near = keepers.units @ self._cases.units(losers).T > self._threshold - _PRODUCT_ERROR
            near &= self._same_readers(keepers.positions, losers)
            near = self._worth_deciding(near, keepers.positions, losers)
            for column in np.flatnonzero(near.any(axis=0)).tolist():
                self._decide(keepers.positions[near[:, column]], int(losers[column]))

    def _worth_deciding(
        self, near: NDArray[np.bool_], keepers: NDArray[np.intp], losers: NDArray[np.intp]
    ) -> NDArray[np.bool_]:
        """Of the `(keepers, losers)` that are near those that may merge, and all of a loser that was never refused.

        In blocks, since a thousand questions that differ in a number are half a million pairs.
        """
        if not self._limits.duplicate_guard or not near.any():
            return near
        rows, columns = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
        apart = np.zeros(near.shape, dtype=np.bool_)
        apart[np.ix_(rows, columns)] = self._senses.apart(keepers[rows], losers[columns])
        worth: NDArray[np.bool_] = near & ~(apart & self._refused[losers])
        return worth

    def _same_readers(self, keepers: NDArray[np.intp], losers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """`(keepers, losers)`: which pairs have the same readers."""
        readers = self._cases.readers
        same: NDArray[np.bool_] = readers[keepers][:, None] == readers[losers][None, :]
        return same

    def _decide(self, keepers: NDArray[np.intp], loser: int) -> None:
        """Let the first of the keepers that may absorb the loser do so."""
        for keeper in keepers.tolist():
            if self._absorbs(keeper, loser):
                return

    def _absorbs(self, keeper: int, loser: int) -> bool:
        """Whether the loser's fate is decided by this keeper: absorbed, or left because it is protected."""
        if self._refused[loser] and self._difference(keeper, loser) is not None:
            return False  # as by one before, which was told
        similarity = cosine(self._vector(keeper), self._vector(loser))
        if similarity <= self._threshold:
            return False
        pair = Pair(int(self._cases.numbers[keeper]), int(self._cases.numbers[loser]), similarity)
        if (different := self._difference(keeper, loser)) is not None:
            self._spared.setdefault(loser, (pair, different))
            self._refused[loser] = True
            return False
        if (protected := self._protection(self._cases.facts(loser))) is not None:
            self._spared[loser] = (pair, protected)
            self._protected[loser] = True  # nobody absorbs it: it is not looked at again
            return True
        self._left[loser] = False
        self._absorbed.append(pair)
        return True

    def _difference(self, keeper: int, loser: int) -> Verdict | None:
        if not self._limits.duplicate_guard:
            return None
        found = contradiction.compare(self._reading(keeper), self._reading(loser))
        return None if found is None else Verdict(Rule.DIFFERENT, str(found))

    def _vector(self, position: int) -> Vector:
        vector: Vector = self._cases.vectors.block(position, position + 1)[0]
        return vector


class _Senses:
    """What can be told of the questions from a few numbers each, read when it is first asked for."""

    def __init__(self, count: int, reading: Callable[[int], contradiction.Features]) -> None:
        self._reading = reading
        self._read = np.zeros(count, dtype=np.bool_)
        self._fingerprints, self._names, self._words = (np.zeros(count, dtype=np.int64) for _ in range(3))

    def apart(self, left: NDArray[np.intp], right: NDArray[np.intp]) -> NDArray[np.bool_]:
        """`(left, right)`: which pairs differ for certain, in numbers, negations or a name."""
        self._know(left)
        self._know(right)
        rows, columns = left[:, None], right[None, :]
        differ: NDArray[np.bool_] = self._fingerprints[rows] != self._fingerprints[columns]
        differ |= (self._names[rows] & ~self._words[columns]) != 0
        differ |= (self._names[columns] & ~self._words[rows]) != 0
        return differ

    def _know(self, positions: NDArray[np.intp]) -> None:
        for position in positions[~self._read[positions]].tolist():
            reading = self._reading(position)
            self._fingerprints[position] = reading.fingerprint
            self._names[position] = reading.name_bits
            self._words[position] = reading.word_bits
            self._read[position] = True


def _sketch_width(dimensions: int) -> int:
    directions = max(_FEWEST_DIRECTIONS, dimensions // _DIRECTIONS_IN)
    return dimensions if dimensions <= 2 * directions else directions + 1


def _directions(vectors: Rows) -> NDArray[np.float64] | None:
    """Orthonormal directions, `(d, m)`; None where the vectors are as short as sketches."""
    width = _sketch_width(vectors.width)
    if width == vectors.width:
        return None
    sample = np.unique(np.linspace(0, len(vectors) - 1, _SAMPLE).astype(np.intp))
    # Completed by the axes, for a sample that spans too few dimensions.
    spanned = np.concatenate([_unit(vectors.take(sample)), np.eye(width - 1, vectors.width) * 1e-6])
    _, _, directions = np.linalg.svd(spanned, full_matrices=False)
    chosen: NDArray[np.float64] = np.ascontiguousarray(directions[: width - 1].T)
    return chosen


def _sketched(units: NDArray[np.float64], directions: NDArray[np.float64] | None) -> NDArray[np.float32]:
    if directions is None:
        return units.astype(np.float32)
    parts = units @ directions
    rest = np.sqrt(np.maximum(0.0, 1.0 - np.einsum("ij,ij->i", parts, parts)))
    return np.concatenate([parts, rest[:, None]], axis=1).astype(np.float32)


def _unit(vectors: NDArray[Any]) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    scaled: NDArray[np.float64] = wide / np.sqrt(np.einsum("ij,ij->i", wide, wide))[:, None]
    return scaled
