"""The facts of many cases. Each case takes about fifty bytes of memory in addition to its id."""

from __future__ import annotations

import math
from array import array
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from perdure.casebank.plan.policy import Facts

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TICK = timedelta(microseconds=1)
_NEVER = -(2**63)


class PackedCases:
    """The `Facts` of cases. A case's number is its index in the order in which cases were appended."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._usage = array("q")
        self._rate = array("d")
        self._accessed = array("q")
        self._created = array("q")
        self._restored = array("q")
        self._readers = array("q")

    def __len__(self) -> int:
        return len(self._ids)

    def append(self, case: Facts, readers: str | None = None) -> None:
        """Append a case. `readers` identifies the users whose prompts the case may enter; `None` means all users."""
        self._readers.append(_mark(readers))
        self._ids.append(case.case_id)
        self._usage.append(case.usage_count)
        self._rate.append(math.nan if case.success_rate is None else case.success_rate)
        self._accessed.append(_packed(case.last_accessed_at))
        self._created.append(_packed(case.created_at))
        self._restored.append(_packed(case.restored_at))

    def __getitem__(self, number: int) -> Facts:
        return Facts(
            case_id=self._ids[number],
            usage_count=self._usage[number],
            success_rate=None if math.isnan(self._rate[number]) else self._rate[number],
            last_accessed_at=_unpacked(self._accessed[number]),
            created_at=_EPOCH + self._created[number] * _TICK,
            restored_at=_unpacked(self._restored[number]),
        )

    def readers(self) -> NDArray[np.int64]:
        """One integer per case, equal for cases with the same readers."""
        return np.asarray(self._readers, dtype=np.int64)

    def keeper_order(self) -> NDArray[np.intp]:
        """The numbers of the cases, sorted by `policy.keeper_order`."""
        alphabetical = np.empty(len(self), dtype=np.intp)
        alphabetical[sorted(range(len(self)), key=self._ids.__getitem__)] = np.arange(len(self))
        rate = np.asarray(self._rate)
        descending_rate = np.where(np.isnan(rate), np.inf, -rate)  # unknown rates last
        keys = (alphabetical, np.asarray(self._created), descending_rate, -np.asarray(self._usage))
        return np.lexsort(keys)  # the last key is the primary one


def _mark(readers: str | None) -> int:
    """A hash of `readers`, because 8 bytes per case take less memory than the string.

    The probability of a collision is about 10^-19 per pair. A collision merges no cases with different
    readers: before each merge, `runs.apply` compares the readers themselves, not the hashes.
    """
    if readers is None:
        return 0
    digest = blake2b(readers.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def _packed(at: datetime | None) -> int:
    return _NEVER if at is None else (at - _EPOCH) // _TICK


def _unpacked(packed: int) -> datetime | None:
    return None if packed == _NEVER else _EPOCH + packed * _TICK
