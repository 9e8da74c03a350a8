"""Finds duplicate cases, and decides which case of a pair absorbs the other. The result is exact.

The search is greedy. It visits the cases in keeper order (`policy.keeper_order`), and skips the cases that are absorbed
already. A visited case, the keeper, absorbs each later case whose cosine with the keeper exceeds the threshold. The
search compares a batch of keepers with all later cases, block by block. Memory use does not grow with the number of
pairs.

For each pair, the search first compares sketches of the two vectors, which is faster. A sketch of a vector is the
vector's projection on a few directions, and the length of the rest of the vector. By the Cauchy-Schwarz inequality, the
inner product of two sketches is at least the inner product of the two vectors. If the product of the sketches is below
the threshold, the two cases are not duplicates. The directions are the principal components of a sample; their
choice affects speed only. `cosines.cosine` decides the remaining pairs, so the sizes of batches and blocks do not
affect the result.

The readers of a case are the users and agents whose prompts the case may enter. Only cases with the same readers are
compared: merging cases with different readers would hide a case from some of its readers.
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
from perdure.casebank.plan.packed_cases import PackedCases
from perdure.casebank.plan.policy import Facts, Rule, Verdict
from perdure.casebank.plan.temporary_files import TextFile, VectorFile
from perdure.settings import CasebankSettings
from perdure.text import contradiction

OnProgress = Callable[[int, int], None]
"""Called after each piece of work with the work done and the total. May report, pause, or raise to stop the work."""

_BLOCK = 4_096
_VERIFIED = 512
_SAMPLE = 512
_FEWEST_DIRECTIONS = 64
_DIRECTIONS_IN = 6
"""A sketch has one direction for every six dimensions of its vector, and at least `_FEWEST_DIRECTIONS`."""

_SKETCH_ERROR = 1e-4
"""A generous bound on the rounding error of the inner product of two sketches in float32."""

_PRODUCT_ERROR = 1e-9
"""A generous bound on the rounding error of the inner product of two unit vectors in float64."""

_READINGS = 20_000


@dataclass(frozen=True, slots=True)
class Pair:
    """Two cases whose cosine exceeds the threshold, by their numbers in `Group.cases`.

    The keeper absorbs the loser, unless the loser is spared.
    """

    keeper: int
    loser: int
    similarity: float


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The pairs to merge, in keeper order, and the pairs whose loser is spared, each with the reason."""

    absorbed: list[Pair]
    spared: list[tuple[Pair, Verdict]]


class Group:
    """Cases whose vectors have the same embedder and number of dimensions. Holds open files until `__exit__`."""

    def __init__(self, dimensions: int) -> None:
        self.cases = PackedCases()
        self._files = ExitStack()
        self._vectors = self._files.enter_context(VectorFile(dimensions))
        self._texts = self._files.enter_context(TextFile())
        self._pending: list[Vector] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, case: Facts, query: str, vector: Vector, readers: str | None = None) -> None:
        """Add a case. `vector` must pass `has_direction`. The case is compared only with cases of equal `readers`."""
        self.cases.append(case, readers)
        self._texts.append(query)
        self._pending.append(vector)
        if len(self._pending) == _VERIFIED:
            self._flush()

    def duplicates(
        self, limits: CasebankSettings, protection: Callable[[Facts], Verdict | None], on_progress: OnProgress
    ) -> Duplicates:
        """Find the group's duplicates. A loser for which `protection` returns a verdict is spared."""
        self._flush()
        with ExitStack() as files:
            ordered = _OrderedGroup(self.cases, self._vectors, self._texts, files, on_progress)
            return _Search(ordered, limits, protection, on_progress).run()

    def _flush(self) -> None:
        if self._pending:
            self._vectors.append(np.stack(self._pending))
            self._pending.clear()


class _OrderedGroup:
    """The cases of a group, sorted in keeper order. A position is an index in this order."""

    def __init__(
        self, cases: PackedCases, vectors: VectorFile, texts: TextFile, files: ExitStack, on_progress: OnProgress
    ) -> None:
        self.numbers = cases.keeper_order()
        self.readers = cases.readers()[self.numbers]
        self._cases = cases
        self._texts = texts
        self._directions = _directions(vectors)
        self.vectors = files.enter_context(VectorFile(vectors.width))
        self.sketches = files.enter_context(VectorFile(_sketch_width(vectors.width)))
        for start in range(0, len(cases), _VERIFIED):
            self._copy(vectors, start)
            on_progress(0, len(cases))

    def __len__(self) -> int:
        return len(self.numbers)

    def facts(self, position: int) -> Facts:
        """The facts of the case at a position."""
        return self._cases[int(self.numbers[position])]

    def reading(self, position: int) -> contradiction.Features:
        """The parsed question of the case at a position."""
        return contradiction.features(self._texts[int(self.numbers[position])])

    def units(self, positions: NDArray[np.intp]) -> NDArray[np.float64]:
        """The vectors at the positions, scaled to length 1: `(k, d)`."""
        return _unit(self.vectors.take(positions))

    def _copy(self, vectors: VectorFile, start: int) -> None:
        numbers = self.numbers[start : start + _VERIFIED]
        block = vectors.take(numbers)
        self.vectors.append(block)
        self.sketches.append(_sketched(_unit(block), self._directions))


class _Keepers:
    """The cases of a batch that may absorb later cases."""

    def __init__(self, ordered: _OrderedGroup, positions: NDArray[np.intp]) -> None:
        self.positions = positions
        self.sketches = ordered.sketches.take(positions)
        self._ordered = ordered

    @cached_property
    def units(self) -> NDArray[np.float64]:
        """The keepers' vectors, scaled to length 1. Computed on first use: sketches often rule out all pairs."""
        return self._ordered.units(self.positions)


class _Search:
    """The search for duplicates in one group."""

    def __init__(
        self,
        ordered: _OrderedGroup,
        limits: CasebankSettings,
        protection: Callable[[Facts], Verdict | None],
        on_progress: OnProgress,
    ) -> None:
        self._cases = ordered
        self._limits = limits
        self._threshold = limits.duplicate_similarity
        self._protection = protection
        self._on_progress = on_progress
        self._left = np.ones(len(ordered), dtype=np.bool_)
        self._absorbed: list[Pair] = []
        self._spared: dict[int, tuple[Pair, Verdict]] = {}
        self._reading = lru_cache(_READINGS)(ordered.reading)
        self._signatures = _Signatures(len(ordered), self._reading)
        self._refused = np.zeros(len(ordered), dtype=np.bool_)
        self._protected = np.zeros(len(ordered), dtype=np.bool_)

    def run(self) -> Duplicates:
        """Compare all cases of the group."""
        for batch in self._batches():
            keepers = _Keepers(self._cases, self._among(batch))
            for start in range(int(batch[-1]) + 1, len(self._cases), _BLOCK):
                self._against(keepers, start, min(start + _BLOCK, len(self._cases)))
                self._on_progress(int(batch[0]), len(self._cases))
        spared = [self._spared[position] for position in sorted(self._spared) if self._left[position]]
        place = np.empty(len(self._cases), dtype=np.intp)
        place[self._cases.numbers] = np.arange(len(self._cases))
        self._absorbed.sort(key=lambda pair: (place[pair.keeper], place[pair.loser]))
        return Duplicates(self._absorbed, spared)

    def _batches(self) -> Iterator[NDArray[np.intp]]:
        """The positions of the cases that are not absorbed, in order, `duplicate_batch` at a time."""
        after = 0
        while (ahead := np.flatnonzero(self._left[after:])[: self._limits.duplicate_batch]).size:
            batch = ahead + after
            yield batch
            after = int(batch[-1]) + 1

    def _among(self, batch: NDArray[np.intp]) -> NDArray[np.intp]:
        """Merge duplicates within the batch; returns the positions of the cases that are not absorbed."""
        units = self._cases.units(batch)
        near = np.triu(units @ units.T > self._threshold - _PRODUCT_ERROR, k=1) & self._same_readers(batch, batch)
        for at in np.flatnonzero(near.any(axis=0) & ~self._protected[batch]).tolist():
            earlier, loser = batch[:at][near[:at, at] & self._left[batch[:at]]], batch[at : at + 1]
            worth = self._worth_deciding(np.ones((len(earlier), 1), dtype=np.bool_), earlier, loser)
            self._decide(earlier[worth[:, 0]], int(loser[0]))
        return batch[self._left[batch]]

    def _against(self, keepers: _Keepers, start: int, stop: int) -> None:
        """Merge the cases at the positions from `start` to before `stop` into the keepers that they duplicate."""
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
        """The pairs in `near` that `_decide` must still examine. `near` and the result are arrays `(keepers, losers)`.

        Drops a pair if two conditions hold: the two questions certainly differ, and an earlier call of `_decide`
        recorded that the loser differs from another keeper. Vectorised, because a thousand questions that differ only
        in a number make half a million pairs.
        """
        if not self._limits.duplicate_guard or not near.any():
            return near
        rows, columns = np.flatnonzero(near.any(axis=1)), np.flatnonzero(near.any(axis=0))
        apart = np.zeros(near.shape, dtype=np.bool_)
        apart[np.ix_(rows, columns)] = self._signatures.apart(keepers[rows], losers[columns])
        worth: NDArray[np.bool_] = near & ~(apart & self._refused[losers])
        return worth

    def _same_readers(self, keepers: NDArray[np.intp], losers: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether a keeper and a loser have the same readers: a boolean array of shape `(keepers, losers)`."""
        readers = self._cases.readers
        same: NDArray[np.bool_] = readers[keepers][:, None] == readers[losers][None, :]
        return same

    def _decide(self, keepers: NDArray[np.intp], loser: int) -> None:
        """Merge the loser into the first keeper that it duplicates, or spare the loser if it is protected."""
        for keeper in keepers.tolist():
            if self._absorbs(keeper, loser):
                return

    def _absorbs(self, keeper: int, loser: int) -> bool:
        """Merge the loser into the keeper, or spare a protected loser. Returns False if the two are not duplicates."""
        if self._refused[loser] and self._difference(keeper, loser) is not None:
            return False  # a difference from an earlier keeper is already recorded
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
            self._protected[loser] = True  # no keeper may absorb the loser: skip it for all later keepers
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


class _Signatures:
    """Three integers for each question, computed on first use.

    Comparing the integers of two questions finds many differences faster than `contradiction.compare`.
    """

    def __init__(self, count: int, reading: Callable[[int], contradiction.Features]) -> None:
        self._reading = reading
        self._read = np.zeros(count, dtype=np.bool_)
        self._fingerprints, self._names, self._words = (np.zeros(count, dtype=np.int64) for _ in range(3))

    def apart(self, left: NDArray[np.intp], right: NDArray[np.intp]) -> NDArray[np.bool_]:
        """An array `(left, right)` of booleans: whether a pair certainly differs in numbers, negations or a name."""
        self._load(left)
        self._load(right)
        rows, columns = left[:, None], right[None, :]
        differ: NDArray[np.bool_] = self._fingerprints[rows] != self._fingerprints[columns]
        differ |= (self._names[rows] & ~self._words[columns]) != 0
        differ |= (self._names[columns] & ~self._words[rows]) != 0
        return differ

    def _load(self, positions: NDArray[np.intp]) -> None:
        for position in positions[~self._read[positions]].tolist():
            reading = self._reading(position)
            self._fingerprints[position] = reading.fingerprint
            self._names[position] = reading.name_bits
            self._words[position] = reading.word_bits
            self._read[position] = True


def _sketch_width(dimensions: int) -> int:
    directions = max(_FEWEST_DIRECTIONS, dimensions // _DIRECTIONS_IN)
    return dimensions if dimensions <= 2 * directions else directions + 1


def _directions(vectors: VectorFile) -> NDArray[np.float64] | None:
    """Orthonormal directions, one per column; `None` if sketches would be as wide as the vectors."""
    width = _sketch_width(vectors.width)
    if width == vectors.width:
        return None
    sample = np.unique(np.linspace(0, len(vectors) - 1, _SAMPLE).astype(np.intp))
    # If the sample spans too few dimensions, the added vectors of length 1e-6 supply the missing directions.
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
