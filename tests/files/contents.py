"""Contents for tests: images, PDFs and archives, as small as their kind allows, and bombs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zipfile
import zlib

from tests.bombs import GIB, gzip_bomb


def png(width: int = 4, height: int = 3, *, padding: int = 0) -> bytes:
    """A PNG of these pixels, whose data is truncated. `padding` adds bytes in a chunk of its own."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"ruSt", bytes(padding)), (b"IDAT", zlib.compress(bytes(64))), (b"IEND", b"")]
    framed = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
        if data or name == b"IEND"
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def gif(width: int = 4, height: int = 3) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(10)


def jpeg(width: int = 4, height: int = 3) -> bytes:
    """A JPEG with a long Exif segment before its frame header."""
    exif = b"\xff\xe1" + struct.pack(">H", 60_002) + bytes(60_000)
    frame = b"\xff\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + exif + exif + frame + b"\xff\xd9"


def webp(kind: bytes = b"VP8X", width: int = 4, height: int = 3) -> bytes:
    """A WebP: extended (VP8X), lossless (VP8L) or lossy (VP8)."""
    match kind:
        case b"VP8X":
            data = bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
        case b"VP8L":
            data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
        case _:
            data = bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", width, height)
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBP" + kind + struct.pack("<I", len(data)) + data


def pdf(pages: int = 1, *, size: int = 0) -> bytes:
    """A PDF of at least `size` bytes."""
    objects = b"".join(b"%d 0 obj << /Type /Page /Parent 1 0 R >> endobj\n" % (each + 2) for each in range(pages))
    body = b"%PDF-1.7\n1 0 obj << /Type /Pages /Count 1 >> endobj\n" + objects
    return body + b"%" * max(0, size - len(body) - 6) + b"\n%%EOF"


def archive(*names: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as made:
        for name in names:
            made.writestr(name, "content")
    return packed.getvalue()


def zip_bomb(unpacked: int = 10 * GIB) -> bytes:
    """A ZIP archive whose directory promises `unpacked` bytes, in entries of 2 GiB."""
    packed = bytearray(archive(*map(str, range(unpacked // (2 * GIB)))))
    at = packed.find(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<I", packed, at + 24, 2 * GIB)
        at = packed.find(b"PK\x01\x02", at + 4)
    return bytes(packed)


BOMBS = {
    "an image of a million pixels' width": png(1_000_000, 1),
    "an image of ten billion pixels": png(20_000, 20_000),
    "a WebP canvas": webp(b"VP8X", 2**24, 2**24),
    "a ZIP of 10 GB": zip_bomb(),
    "a gzip of 10 GB": gzip_bomb(10 * GIB),
    "a bzip2 of 10 GB": bz2.compress(bytes(2**23)) * 1_280,
    "an xz of 10 GB": lzma.compress(bytes(2**23)) * 1_280,
    "an xz that takes 64 MiB": lzma.compress(b"hello", preset=9),
}
"""Contents that would take gigabytes when decoded or unpacked."""

GZIPPED = gzip.compress(b"hello " * 1_000)
