"""`EmbedderSuite`: behavioural tests that every embedder must pass."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from perdure.errors import DeadlineExceeded
from perdure.models.embedders.protocol import Embedder, Vector
from perdure.models.protocol import CallAborted
from perdure.testing.suites.models import new_call

TEXTS = ["My name is Ana and I live in Lyon.", "저는 커피를 좋아합니다", "", " \n", "?!", "a\ud83d\x00b", "x" * 50_000]


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


class EmbedderSuite:
    """Tests of an embedder. Subclass it and define a fixture `embedder`."""

    def test_gives_each_text_a_vector_of_length_1(self, embedder: Embedder) -> None:
        """Even an empty text has a vector of length 1, because the cosine of a zero vector is undefined."""
        vectors = embedder.embed(TEXTS)
        assert len(vectors) == len(TEXTS)
        assert {len(each) for each in vectors} == {embedder.dimensions}
        assert all(math.isclose(math.hypot(*each), 1.0, abs_tol=1e-5) for each in vectors)

    def test_a_text_has_the_same_vector_alone_and_in_any_batch(self, embedder: Embedder) -> None:
        """A query is embedded alone and compared with messages that were embedded in batches."""
        many = embedder.embed([f"text {number}" for number in range(70)])
        assert embedder.embed(["text 66"]) == [many[66]]
        assert embedder.embed(["text 3", "text 3", "text 66"]) == [many[3], many[3], many[66]]

    def test_an_empty_batch_has_no_vectors(self, embedder: Embedder) -> None:
        """A caller may have no texts to embed."""
        assert embedder.embed([]) == []

    def test_does_not_begin_an_aborted_or_expired_call(self, embedder: Embedder) -> None:
        """An aborted or expired call must not send a request to the provider."""
        call = new_call()
        call.abort()
        with pytest.raises(CallAborted):
            embedder.embed(["never embedded before"], call)
        with pytest.raises(DeadlineExceeded):
            embedder.embed(["never embedded before"], new_call(timeout_s=0.0))

    def test_may_be_shared_by_threads(self, embedder: Embedder) -> None:
        """One embedder serves all the turns of a process, and each turn gets the vectors of its own texts."""
        texts = [f"text {number}" for number in range(40)]
        expected = [embedder.embed([each])[0] for each in texts]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda text: embedder.embed([text])[0], texts * 3))
        assert got == expected * 3
