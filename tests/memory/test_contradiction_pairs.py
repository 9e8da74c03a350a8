"""The contradiction check on hand-written pairs: it finds every contradiction and accepts nearly all paraphrases."""

from __future__ import annotations

import pytest

from perdure.text.contradiction import difference
from tests.memory.pairs import CONTRADICTIONS, PARAPHRASES

AT_LEAST = 0.8


def test_the_set_is_large_enough() -> None:
    """The set has at least thirty contradictions and thirty paraphrases, all kinds of differences and no pair twice."""
    assert len(CONTRADICTIONS) + len(PARAPHRASES) >= 60
    assert {kind for kind, _, _ in CONTRADICTIONS} == {"number", "negation", "name", "opposite"}
    assert min(len(CONTRADICTIONS), len(PARAPHRASES)) >= 30
    assert len({*CONTRADICTIONS}) + len({*PARAPHRASES}) == len(CONTRADICTIONS) + len(PARAPHRASES)


@pytest.mark.parametrize(("kind", "earlier", "later"), CONTRADICTIONS)
def test_no_contradiction_passes(kind: str, earlier: str, later: str) -> None:
    """Every contradiction is found, in either order. A missed contradiction would reinforce a wrong memory."""
    assert difference(earlier, later) is not None, kind
    assert difference(later, earlier) is not None, kind


def test_most_paraphrases_pass() -> None:
    """Most paraphrases are accepted. A paraphrase that is mistaken for a contradiction costs only a row."""
    passed = [pair for pair in PARAPHRASES if difference(*pair) is None]
    assert len(passed) >= AT_LEAST * len(PARAPHRASES)
    assert passed == [pair for pair in PARAPHRASES if difference(*reversed(pair)) is None]
