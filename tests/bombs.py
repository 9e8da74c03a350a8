"""Decompression bombs for tests, and `peak`, which measures allocated memory."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1024**2
GIB = 1024**3


def gzip_bomb(unpacked: int = GIB, *, before: bytes = b"") -> bytes:
    """A truncated gzip stream: `before`, then `unpacked` bytes of spaces, without the trailer.

    The stream repeats one compressed block of 1 MiB. A full flush ends each block, so no block refers to earlier data.
    """
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    head = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (unpacked // MIB)


class Peak:
    """The result of `peak`: the maximum memory that Python allocated within the `with` block, in MiB."""

    mib = 0.0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the maximum memory that all threads together allocate within the `with` block."""
    found = Peak()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield found
        found.mib = (tracemalloc.get_traced_memory()[1] - before) / MIB
    finally:
        tracemalloc.stop()
