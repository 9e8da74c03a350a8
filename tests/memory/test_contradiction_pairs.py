"""The contradiction check finds every hand-written contradiction and accepts most hand-written paraphrases."""

from __future__ import annotations

import pytest

from perdure.text.contradiction import difference
from tests.memory.pairs import CONTRADICTIONS, PARAPHRASES

AT_LEAST = 0.8


def test_the_set_is_large_enough() -> None:
    """The pairs include at least thirty contradictions and thirty paraphrases.

    The contradictions cover all four kinds of differences. No pair occurs twice.
    """
    assert len(CONTRADICTIONS) + len(PARAPHRASES) >= 60
    assert {kind for kind, _, _ in CONTRADICTIONS} == {"number", "negation", "name", "opposite"}
    assert min(len(CONTRADICTIONS), len(PARAPHRASES)) >= 30
    assert len({*CONTRADICTIONS}) + len({*PARAPHRASES}) == len(CONTRADICTIONS) + len(PARAPHRASES)


@pytest.mark.parametrize(("kind", "earlier", "later"), CONTRADICTIONS)
def test_no_contradiction_passes(kind: str, earlier: str, later: str) -> None:
    """`difference` finds every contradiction, in either order. A missed one would reinforce a wrong memory."""
    assert difference(earlier, later) is not None, kind
    assert difference(later, earlier) is not None, kind


def test_most_paraphrases_pass() -> None:
    """At least 80 % of the paraphrases are accepted. A rejected paraphrase only costs one more row."""
    passed = [pair for pair in PARAPHRASES if difference(*pair) is None]
    assert len(passed) >= AT_LEAST * len(PARAPHRASES)
    assert passed == [pair for pair in PARAPHRASES if difference(*reversed(pair)) is None]
