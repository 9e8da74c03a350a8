"""Bodies that are small on the wire and large unpacked, and what reading one costs."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1024**2
GIB = 1024**3


def gzip_bomb(unpacked: int = GIB, *, before: bytes = b"") -> bytes:
    """A gzip stream of `before` and spaces, `unpacked` bytes in all, without its end.

    Compressed once per megabyte: after a full flush each block stands for itself.
    """
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    head = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (unpacked // MIB)


class Peak:
    """Bytes that Python allocated within the block, at most at once."""

    mib = 0.0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the block; every thread of the process counts."""
    found = Peak()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield found
        found.mib = (tracemalloc.get_traced_memory()[1] - before) / MIB
    finally:
        tracemalloc.stop()
