"""Bodies that are small on the wire and large when decompressed, and `peak`, which measures allocated memory."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

MIB = 1024**2
GIB = 1024**3


def gzip_bomb(unpacked: int = GIB, *, before: bytes = b"") -> bytes:
    """A truncated gzip stream: `before`, then `unpacked` bytes of spaces, without the trailer.

    One megabyte is compressed and repeated: after a full flush, each block can be decompressed by itself.
    """
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    head = packer.compress(before) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(b" " * MIB) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * (unpacked // MIB)


class Peak:
    """Peak of the memory that Python allocated within the block, in MiB."""

    mib = 0.0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the memory that all threads allocate within the block."""
    found = Peak()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        yield found
        found.mib = (tracemalloc.get_traced_memory()[1] - before) / MIB
    finally:
        tracemalloc.stop()
