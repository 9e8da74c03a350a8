"""Replies in a terminal are wrapped between words while they arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from perdure.cli.talk.wrapping import Wrapping

TEXTS = st.lists(
    st.sampled_from(
        ["a", "word", "longer-word", "日本語", "https://example.com/a/very/long/one", " ", "  ", "\n", "\t"]
    )
).map("".join)


def _wrapped(*parts: str, width: int = 20) -> str:
    wrapping = Wrapping(width)
    return "".join(wrapping.add(part) for part in parts) + wrapping.end()


@given(TEXTS, st.lists(st.integers(0, 200), max_size=8))
@example("a日本語日本語日本語\ta", [])
def test_a_text_is_wrapped_alike_however_it_arrives(text: str, cuts: list[int]) -> None:
    """No line is too long unless it is a single word. The words and line breaks of the text stay."""
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown = _wrapped(*(text[a:b] for a, b in pairwise(ends)))
    assert shown == _wrapped(text)
    assert shown.split() == text.split()
    assert shown.count("\n") >= text.count("\n")
    for line in shown.expandtabs(1).split("\n"):
        assert cell_len(line) <= 20 or len(line.split()) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("one two three four five six", "one two three four\nfive six"),
        ("- one two three four\n\n  five", "- one two three four\n\n  five"),
        (
            "```\nx = a + b + c + d + e\n```\none two three four five",
            "```\nx = a + b + c + d + e\n```\none two three four\nfive",
        ),
    ],
)
def test_paragraphs_lists_and_code(text: str, shown: str) -> None:
    """Code is never broken, so that it can be copied."""
    assert _wrapped(text) == shown
