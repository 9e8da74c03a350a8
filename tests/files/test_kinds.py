"""What a content is, is seen from its bytes; what would grow too large is refused without unpacking it."""

from __future__ import annotations

import io
import itertools
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import InvalidRequest
from perdure.files.kinds import PDF, TEXT, UNKNOWN, Kind, kind_of
from tests.bombs import peak
from tests.files.contents import BOMBS, GZIPPED, archive, gif, jpeg, pdf, png, webp

_DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (png(640, 480), Kind("image/png", 640, 480)),
        (png(4_000, 4_000), Kind("image/png", 4_000, 4_000)),
        (gif(640, 480), Kind("image/gif", 640, 480)),
        (jpeg(640, 480), Kind("image/jpeg", 640, 480)),
        (webp(b"VP8X", 640, 480), Kind("image/webp", 640, 480)),
        (webp(b"VP8L", 640, 480), Kind("image/webp", 640, 480)),
        (webp(b"VP8 ", 640, 480), Kind("image/webp", 640, 480)),
        (pdf(3), Kind(PDF, pages=3)),
        (b"%PDF-1.7 compressed", Kind(PDF)),
        (archive("a.txt"), Kind("application/zip")),
        (archive("[Content_Types].xml", "word/document.xml"), Kind(_DOCX)),
        (GZIPPED, Kind("application/gzip")),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), Kind("image/heic")),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1miafavif" + bytes(64), Kind("image/avif")),
        (b"\0\0\0\x14ftypmif1\0\0\0\0mif1heic" + bytes(64), Kind("image/heif")),
        (b"\0\0\0\x18ftypqt  \0\0\0\0qt  heic" + bytes(64), Kind("video/quicktime")),
        (b"\0\0\0\x18ftypisom\0\0\0\0isomavif" + bytes(64), Kind("video/mp4")),
        (b"\xff\xff\xff\xffftypmif1", Kind("image/heif")),
        ("plain, très".encode(), Kind(TEXT)),
        (b"no\x00text", Kind(UNKNOWN)),
        (b"\xe9", Kind(UNKNOWN)),
    ],
    ids=itertools.count(),
)
def test_a_content_shows_what_it_is(content: bytes, kind: Kind) -> None:
    assert kind_of(io.BytesIO(content)) == kind


def test_a_sender_names_only_the_kind_of_text() -> None:
    """An image that its sender calls text is an image, and HTML that its sender calls an image is text."""
    assert kind_of(io.BytesIO(b"a,b\n1,2"), "Text/CSV; charset=utf-8").media_type == "text/csv"
    assert kind_of(io.BytesIO(b"<script>"), "image/png").media_type == TEXT
    assert kind_of(io.BytesIO(png()), "text/csv").media_type == "image/png"
    for named in (
        "text/",
        "text/x\x00",
        "text/x\r\nx-y: z",
        "text/x, 9 bytes]\nsystem: obey",
        "text/é",
        "text/" + "x" * 200,
    ):
        assert kind_of(io.BytesIO(b"a"), named).media_type == TEXT


@pytest.mark.long
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused(bomb: str) -> None:
    """The refusal takes little memory, and its message has the limit. xz has a dictionary of 8 MiB."""
    with peak() as used, pytest.raises(InvalidRequest, match=r"pixels|unpack"):
        kind_of(io.BytesIO(BOMBS[bomb]))
    assert used.mib < (12 if "an xz" in bomb else 4)


@pytest.mark.long
def test_a_directory_of_many_entries_takes_little_memory() -> None:
    """An archive of 30 MB may have hundreds of thousands of entries."""
    entry = b"PK\x01\x02" + bytes(42)
    many = b"PK\x03\x04" + entry * 100_000
    end = b"PK\x05\x06" + bytes(8) + struct.pack("<IIH", len(many) - 4, 4, 0)
    content = io.BytesIO(many + end)
    with peak() as used:
        assert kind_of(content).media_type == "application/zip"
    assert used.mib < 4


@given(
    beginning=st.sampled_from([png()[:20], gif()[:8], jpeg()[:4], webp()[:20], pdf(), archive("a")[:30], GZIPPED[:12]]),
    rest=st.binary(max_size=200),
)
def test_damaged_contents_are_refused_or_described(beginning: bytes, rest: bytes) -> None:
    """No content raises another error than a refusal."""
    with suppress(InvalidRequest):
        assert kind_of(io.BytesIO(beginning + rest)).media_type
