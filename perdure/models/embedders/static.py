"""`static:384`: vectors of 16,000 English words, from the package itself. Needs neither network, model nor library.

A text's vector has two parts. 128 components are the sum of its words' vectors, which are learned: words of similar
meaning have similar vectors, and telling words long ones. 256 components hash the words and their parts, as `hash:256`
does; they tell texts apart whose words have no vectors, such as names and other languages. The more of a text's words
have vectors, the more weighs their meaning.

The file `static.bin` is a table of static embeddings (as of GloVe and Model2Vec), made by
`benchmarks/static_vectors.py`: the words' vectors were trained until their sums were similar to the vectors that
all-MiniLM-L6-v2 (Apache License 2.0) gives to the definitions and examples of WordNet 3.1. Its content: a line with
the numbers of words, of components and of related words; the words, one per line; for each word a scale, as a float of
four bytes; for each word its components, as signed bytes; for each word the places of the words that are most similar
to it, without those that have its stem, as unsigned numbers of two bytes; for each word their cosines times 255, as
unsigned bytes. Vectors are stored, so other vectors, or another rule how they are made, need another name than
`static:384`.

Recall uses the table with every embedder: its search by words also finds related words (`memory.recall.expansion`), and
it compares the words of what it found with those of the question (`memory.recall.late_interaction`).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import byteorder
from threading import Lock

from perdure.models.embedders.hashing import HashEmbedder, words
from perdure.models.embedders.protocol import Vector, unit
from perdure.models.protocol import ModelCall

DIMENSIONS = 384
"""The only number of dimensions."""

_FILE = Path(__file__).with_name("static.bin")
MEANING = 128
"""The number of components of a word's vector."""

_SHARE = 0.8
"""The share of the meaning in the square of a vector's length, if all words of the text have vectors.

Otherwise the share falls with the square of their share of the words: one English word in a text of another language,
or a word that two languages spell alike, must not decide about the text.
"""

_MOST_POSITIVE = 127
_SIGNS = bytes(ord("1") if 0 < byte <= _MOST_POSITIVE else ord("0") for byte in range(256))


@dataclass(frozen=True, slots=True)
class Table:
    """The words' vectors, and the `related` places of each word, most similar first. Words are named by their places.

    The vector of the word `at` is `of(at)` times `scales[at]`.
    """

    words: list[str]
    places: dict[str, int]
    scales: array[float]
    components: memoryview[int]
    size: int
    related: memoryview[int]
    cosines: memoryview[int]

    def find(self, word: str) -> int | None:
        """The place of a word, or of its singular; `None` if the table has neither."""
        return self.places.get(word, self.places.get(singular(word)))

    def of(self, at: int) -> memoryview[int]:
        """The components of the word `at`."""
        return self.components[at * self.size : (at + 1) * self.size]

    def signs(self, at: int) -> int:
        """The signs of the components of the word `at`: a bit is set if its component is positive."""
        return int(self.of(at).tobytes().translate(_SIGNS), 2)

    def related_to(self, at: int) -> dict[int, float]:
        """The places of the words that are related to the word `at`, and their cosines. Stop words have none."""
        most = len(self.related) // len(self.words)
        found = slice(at * most, (at + 1) * most)
        pairs = zip(self.related[found], self.cosines[found], strict=True)
        return {other: cosine / 255 for other, cosine in pairs if other != at}

    def meaning(self, text: str) -> tuple[list[float], float]:
        """The sum of the vectors of the words in `text`, and the share of its words that have one."""
        said = Counter(words(text))
        total, found = [0.0] * self.size, 0
        for word, times in said.items():
            at = self.find(word)
            if at is None:
                continue
            found += 1
            scale = times * self.scales[at]
            added = [scale * each for each in self.of(at)]
            total = [one + other for one, other in zip(total, added, strict=True)]
        return total, found / max(len(said), 1)


def singular(word: str) -> str:
    """The word without a final s."""
    return word if word.endswith("ss") else word.removesuffix("s")


_loading = Lock()
_loaded: list[Table] = []


def table() -> Table:
    """The table in the package's file, read once in each process. It takes 6 MB."""
    if not _loaded:
        with _loading:  # the threads of a worker may all need it at once
            if not _loaded:
                _loaded.append(_read(_FILE.read_bytes()))
    return _loaded[0]


def _read(content: bytes) -> Table:
    head, lines = content.split(b"\n", 1)
    number, size, most = map(int, head.split())
    *known, rest = lines.split(b"\n", number)
    named = [word.decode() for word in known]
    scales, components = array("f", rest[: 4 * number]), memoryview(rest)[4 * number : (4 + size) * number].cast("b")
    places_end = (4 + size + 2 * most) * number
    related, cosines = array("H", rest[(4 + size) * number : places_end]), memoryview(rest)[places_end:]
    if byteorder == "big":
        scales.byteswap()
        related.byteswap()
    places = {word: at for at, word in enumerate(named)}
    return Table(named, places, scales, components, size, memoryview(related), cosines)


class StaticEmbedder:
    """The embedder with the package's vectors of words."""

    def __init__(self) -> None:
        self._parts = HashEmbedder(DIMENSIONS - MEANING)

    @property
    def name(self) -> str:
        return f"static:{DIMENSIONS}"

    @property
    def dimensions(self) -> int:
        return DIMENSIONS

    def embed(self, texts: Sequence[str], call: ModelCall | None = None) -> list[Vector]:
        """One vector for each text. Raises the errors of `Embedder.embed`."""
        vectors = []
        for text, parts in zip(texts, self._parts.embed(texts, call), strict=True):
            if call is not None:
                call.remaining()
            meaning, known = table().meaning(text)
            length = math.hypot(*meaning)
            share = _SHARE * known**2 if length else 0.0
            meant, rest = math.sqrt(share) / (length or 1.0), math.sqrt(1 - share)
            vectors.append(unit([*(meant * each for each in meaning), *(rest * each for each in parts)]))
        return vectors
