"""Unlinked temporary files that hold the planner's vectors and texts.

The planner reads and writes these files in blocks, so vectors and texts do not stay in memory.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray


class _TemporaryFile:
    """An unlinked temporary file. Leaving the context frees its space."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by close)
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, which frees its space."""
        self._file.close()

    def _append(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file.fileno(), view, self._end)
            self._end += written
            view = view[written:]

    def _read(self, start: int, size: int) -> bytes:
        """`size` bytes from `start`. Loops, because `pread` may return fewer bytes."""
        parts = []
        while size:
            part = os.pread(self._file.fileno(), size, start)
            if not part:
                raise EOFError(f"the temporary file ends before byte {start + size}")
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class VectorFile(_TemporaryFile):
    """Vectors of `width` dimensions, stored in a file: `(n, width)` float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self._row_bytes = width * 4

    def __len__(self) -> int:
        return self._end // self._row_bytes

    def append(self, rows: NDArray[np.float32]) -> None:
        """Append `(k, width)` rows."""
        self._append(np.ascontiguousarray(rows, dtype=np.float32).data)

    def block(self, start: int, stop: int) -> NDArray[np.float32]:
        """The rows from `start` to before `stop`."""
        data = self._read(start * self._row_bytes, (stop - start) * self._row_bytes)
        return np.frombuffer(data, dtype=np.float32).reshape(stop - start, self.width)

    def take(self, numbers: NDArray[np.intp]) -> NDArray[np.float32]:
        """The rows with the indexes `numbers`, in the order of `numbers`."""
        taken = np.empty((len(numbers), self.width), dtype=np.float32)
        for at, number in enumerate(numbers.tolist()):
            taken[at] = np.frombuffer(self._read(number * self._row_bytes, self._row_bytes), dtype=np.float32)
        return taken


class TextFile(_TemporaryFile):
    """Texts by number, stored in a file. Memory holds only an offset of eight bytes per text."""

    def __init__(self) -> None:
        super().__init__()
        self._starts = array("q", [0])

    def append(self, text: str) -> None:
        """Append a text."""
        self._append(text.encode("utf-8", "surrogatepass"))
        self._starts.append(self._end)

    def __getitem__(self, number: int) -> str:
        start = self._starts[number]
        return self._read(start, self._starts[number + 1] - start).decode("utf-8", "surrogatepass")
