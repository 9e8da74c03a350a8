"""What a content is. Its bytes decide, not the name or the type that its sender gave.

Nothing is decoded: the size of an image is in its header, and the size of an unpacked archive in its directory. A
library of images is no help here: Pillow allocates the canvas of a WebP image when it opens the file.
"""

from __future__ import annotations

import bz2
import codecs
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from perdure.errors import InvalidRequest
from perdure.text.patterns import compiled

TEXT = "text/plain"
PDF = "application/pdf"
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
TEXTS = ("text/", "application/json", "application/xml", "application/x-yaml", "application/javascript")
"""The beginnings of the types of text. A sender may name one, because the contents of all look alike."""
UNKNOWN = "application/octet-stream"
_MEDIA_TYPE = compiled(r"[a-z]{1,20}/[a-z0-9][a-z0-9.+_-]{0,100}")

MAX_SIDE = 20_000
"""The longest side of an image, in pixels."""

MAX_PIXELS = 100_000_000
"""The most pixels of an image: decoded, they take 400 MB."""

MAX_UNPACKED = 2**28
"""The most bytes of an unpacked archive."""

_HEAD = 2**16
_PIECE = 2**16
_DICTIONARY = 2**24
"""The most bytes of memory that unpacking xz may take. By default, `xz` makes files that take 9 MiB."""

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", PDF),
    (b"PK\x03\x04", "application/zip"),
    (b"PK\x05\x06", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"BZh", "application/x-bzip2"),
    (b"\xfd7zXZ\x00", "application/x-xz"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"7z\xbc\xaf\x27\x1c", "application/x-7z-compressed"),
    (b"Rar!\x1a\x07", "application/vnd.rar"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"fLaC", "audio/flac"),
)
_BRANDS = {
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"hevc": "image/heic-sequence",
    b"hevx": "image/heic-sequence",
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"mif1": "image/heif",
    b"msf1": "image/heif-sequence",
    b"qt  ": "video/quicktime",
    b"M4A ": "audio/mp4",
    b"M4B ": "audio/mp4",
}
"""The types of files of the ISO base media format, which phones write for photos, too, by their brand."""

_OFFICE = {
    b"word/": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    b"xl/": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    b"ppt/": "application/vnd.openxmlformats-officedocument.presentationml.presentation",
}
_JPEG_SIZES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
_JPEG_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


@dataclass(frozen=True, slots=True)
class Kind:
    """What a content is: its media type, the pixels of an image, and the pages of a PDF as far as they are known."""

    media_type: str
    width: int | None = None
    height: int | None = None
    pages: int | None = None


def kind_of(content: BinaryIO, named: str | None = None) -> Kind:
    """What `content` is. `named` is the type that its sender gave; it only distinguishes kinds of text.

    Raises:
        InvalidRequest: it is an image without a readable header, an image with too many pixels, or an archive that
            would unpack to too many bytes.
    """
    head = _read(content, 0, _HEAD)
    media_type = next((each for magic, each in _MAGIC if head.startswith(magic)), None)
    if head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b"WAVE"):
        media_type = "image/webp" if head[8:12] == b"WEBP" else "audio/wav"
    if head[4:8] == b"ftyp":
        media_type = _media_of(head)
    match media_type:
        case "image/png" | "image/jpeg" | "image/gif" | "image/webp":
            width, height = _pixels(media_type, head, content)
            return Kind(media_type, width, height)
        case "application/pdf":
            return Kind(PDF, pages=_pages(content) or None)
        case "application/zip":
            return Kind(_archive(content))
        case "application/gzip" | "application/x-bzip2" | "application/x-xz":
            _check_unpacked(_unpacked(content, _UNPACKERS[media_type]))
            return Kind(media_type)
        case None if _is_text(content):
            base = (named or "").partition(";")[0].strip().lower()
            return Kind(base if base.startswith(TEXTS) and _MEDIA_TYPE.fullmatch(base) else TEXT)
    return Kind(media_type or UNKNOWN)


def _media_of(head: bytes) -> str:
    """The type of a file of the ISO base media format. If its brand stands for any image, the next brands decide."""
    end = min(int.from_bytes(head[:4], "big"), len(head))
    brand, others = head[8:12], (head[at : at + 4] for at in range(16, end, 4))
    if brand in {b"mif1", b"msf1"}:
        brand = next((each for each in others if each in _BRANDS and each not in {b"mif1", b"msf1"}), brand)
    return _BRANDS.get(brand, "video/mp4")


def _read(content: BinaryIO, at: int, size: int) -> bytes:
    content.seek(at)
    return content.read(size)


def _pixels(media_type: str, head: bytes, content: BinaryIO) -> tuple[int, int]:
    try:
        width, height = _size_of_jpeg(content) if media_type == "image/jpeg" else _SIZES[media_type](head)
    except (struct.error, IndexError, ValueError):
        width = height = 0
    if width < 1 or height < 1:
        raise InvalidRequest(f"The image cannot be read: it begins like {media_type}, but its header is damaged.")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise InvalidRequest(
            f"The image has {width:,} by {height:,} pixels; at most {MAX_SIDE:,} on a side and {MAX_PIXELS:,} in all "
            "are accepted."
        )
    return width, height


def _size_of_png(head: bytes) -> tuple[int, int]:
    if head[12:16] != b"IHDR":
        raise ValueError("the first chunk is not IHDR")
    width, height = struct.unpack_from(">II", head, 16)
    return width, height


def _size_of_gif(head: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", head, 6)
    return width, height


def _size_of_webp(head: bytes) -> tuple[int, int]:
    """The size in the first chunk: of the canvas (VP8X), a lossless image (VP8L) or a lossy one (VP8)."""
    match head[12:16]:
        case b"VP8X":
            return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", head, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
        case _:
            raise ValueError("the first chunk has no size")


_SIZES = {"image/png": _size_of_png, "image/gif": _size_of_gif, "image/webp": _size_of_webp}


def _size_of_jpeg(content: BinaryIO) -> tuple[int, int]:
    """The size in the first frame header. The segments before it, such as Exif data, are skipped by their lengths."""
    at = 2
    while True:
        lead, marker = _read(content, at, 2)
        if lead != 0xFF:  # noqa: PLR2004 (each marker begins with this byte)
            raise ValueError("a segment does not begin with a marker")
        if marker == 0xFF:  # noqa: PLR2004 (a byte that fills)
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", _read(content, at + 5, 4))
            return width, height
        else:
            (length,) = struct.unpack_from(">H", _read(content, at + 2, 2))
            at += 2 + length


def _pages(content: BinaryIO) -> int:
    """The pages whose objects are not compressed; 0 if there are none."""
    content.seek(0)
    found = 0
    while piece := content.read(_PIECE):
        found += sum(piece.count(each) - piece.count(each + b"s") for each in (b"/Type /Page", b"/Type/Page"))
    return found


def _archive(content: BinaryIO) -> str:
    """The media type of a ZIP archive, which may be a document of an office suite.

    Reads the entries of its directory one by one: `zipfile` would keep an object for each of them.

    Raises:
        InvalidRequest: it has no readable directory, or would unpack to too many bytes.
    """
    try:
        unpacked, media_type = 0, "application/zip"
        for size, name in _entries(content):
            unpacked += size
            found = (kind for beginning, kind in _OFFICE.items() if name.startswith(beginning))
            media_type = next(found, media_type)
    except (struct.error, ValueError):
        raise InvalidRequest("The archive cannot be read: it begins like ZIP, but its directory is damaged.") from None
    _check_unpacked(unpacked)
    return media_type


def _entries(content: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The unpacked size and the name of each entry. Sizes beyond 4 GiB count as 4 GiB."""
    length = content.seek(0, 2)
    start = max(0, length - _HEAD - 22)
    tail = _read(content, start, _HEAD + 22)
    end = tail.rindex(b"PK\x05\x06")  # of all before the comment
    size, at = struct.unpack_from("<II", tail, end + 12)
    if at + size > start + end:
        raise ValueError("the directory is not before its end")  # also of ZIP64, which only larger archives need
    until = at + size
    while at < until:
        header = _read(content, at, 46)
        if header[:4] != b"PK\x01\x02":
            raise ValueError("an entry does not begin with its signature")
        (unpacked,) = struct.unpack_from("<I", header, 24)
        name, extra, comment = struct.unpack_from("<HHH", header, 28)
        yield unpacked, content.read(name)
        at += 46 + name + extra + comment


class _Unpacker(Protocol):
    """A decompressor of the standard library."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class _Gunzipper:
    """`zlib.decompressobj`, which gives back what it has not read, as a decompressor that keeps it."""

    def __init__(self) -> None:
        self._unpacker = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._unpacker.eof

    @property
    def unused_data(self) -> bytes:
        return self._unpacker.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return self._unpacker.decompress(self._unpacker.unconsumed_tail + data, max_length)


_UNPACKERS: Mapping[str, Callable[[], _Unpacker]] = {
    "application/gzip": _Gunzipper,
    "application/x-bzip2": bz2.BZ2Decompressor,
    "application/x-xz": lambda: lzma.LZMADecompressor(memlimit=_DICTIONARY),
}


def _unpacked(content: BinaryIO, unpacker: Callable[[], _Unpacker]) -> int:
    """The unpacked size, at least `MAX_UNPACKED` + 1 if it is greater. Keeps one piece in memory.

    What follows the last readable part is not counted: it is described, and never unpacked.

    Raises:
        InvalidRequest: unpacking would take too much memory.
    """
    content.seek(0)
    size, unpacking, packed = 0, unpacker(), content.read(_PIECE)
    try:
        while size <= MAX_UNPACKED:
            piece = unpacking.decompress(packed, _PIECE)
            size, packed = size + len(piece), b""
            if unpacking.eof:
                unpacking, packed = unpacker(), unpacking.unused_data or content.read(_PIECE)
            elif not piece:
                packed = content.read(_PIECE)
            if not (piece or packed):
                break
    except lzma.LZMAError as error:
        if "limit" in str(error):
            raise InvalidRequest(
                f"The archive would take more than {_DICTIONARY:,} bytes of memory to unpack, and is not accepted. A "
                "lower level, such as `xz -6`, takes less."
            ) from None
    except (zlib.error, OSError, EOFError):
        pass
    return size


def _check_unpacked(size: int) -> None:
    if size > MAX_UNPACKED:
        raise InvalidRequest(f"The archive would unpack to more than {MAX_UNPACKED:,} bytes, and is not accepted.")


def _is_text(content: BinaryIO) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    content.seek(0)
    try:
        while piece := content.read(_PIECE):
            if b"\x00" in piece:
                return False
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
