"""The default minimum similarity: most rephrased questions find their topic's case, and none finds another topic's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from perdure.casebank.lookup import least_similarity
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.embedders.static import StaticEmbedder
from tests.casebank.questions import ASIDES, TOPICS


def _cosines(embedder: Embedder, texts: list[str]) -> NDArray[np.float64]:
    """The cosine of each text with each topic's stored case, in an array of shape `(texts, topics)`."""
    stored = np.array(embedder.embed([topic[0] for topic in TOPICS]))
    cosines: NDArray[np.float64] = np.array(embedder.embed(texts)) @ stored.T
    return cosines


BUILT_IN = [*(HashEmbedder(each) for each in (64, 128, 199, 200, 256, 384, 768, 1536)), StaticEmbedder()]


@pytest.mark.parametrize("embedder", BUILT_IN, ids=lambda each: each.name)
def test_no_question_reaches_a_case_of_another_topic(embedder: Embedder) -> None:
    """With the default minimum, none of 147 messages finds a case of another topic in a bank of 45 cases."""
    least = least_similarity(embedder.name, None)
    wordings = [(at, wording) for at, topic in enumerate(TOPICS) for wording in topic]
    cosines = _cosines(embedder, [wording for _, wording in wordings])
    cosines[range(len(wordings)), [at for at, _ in wordings]] = -1
    assert cosines.max() < least
    assert _cosines(embedder, list(ASIDES)).max() < least


@pytest.mark.parametrize(("embedder", "found"), [(HashEmbedder(384), 80), (StaticEmbedder(), 81)])
def test_other_wordings_find_their_case(embedder: Embedder, found: int) -> None:
    """So many of the 90 rephrased questions find their topic's case, as docs/casebank.md states."""
    wordings = [(at, wording) for at, topic in enumerate(TOPICS) for wording in topic[1:]]
    cosines = _cosines(embedder, [wording for _, wording in wordings])
    own = cosines[range(len(wordings)), [at for at, _ in wordings]]
    assert (len(own), int((own >= least_similarity(embedder.name, None)).sum())) == (90, found)


@pytest.mark.parametrize(
    ("embedder", "least"),
    [
        ("hash:64", 0.6),
        ("hash:384", 0.5),
        ("static:384", 0.55),
        ("sentence-transformers:all-MiniLM-L6-v2", 0.6),
        ("sentence-transformers:sentence-transformers/all-MiniLM-L6-v2", 0.6),
        ("sentence-transformers:/models/all-minilm-l6-v2/", 0.6),
        ("sentence-transformers:intfloat/e5-small", 0.85),
        ("fastembed:/models/all-MiniLM-L6-v2/", 0.6),
        ("fastembed:BAAI/bge-small-en-v1.5", 0.85),
        ("openai:text-embedding-3-small", 0.6),
        ("openai:text-embedding-3-large", 0.6),
        ("openai:text-embedding-ada-002", 0.85),
        ("third-party:anything", 0.85),
    ],
)
def test_each_embedder_has_a_default(embedder: str, least: float) -> None:
    """The default minimum similarity depends on the embedder, and is strictest for an unknown embedder.

    A setting, even 0, overrides the default.
    """
    assert least_similarity(embedder, None) == least
    assert least_similarity(embedder, 0.0) == 0.0
    assert least_similarity(embedder, 0.7) == 0.7
