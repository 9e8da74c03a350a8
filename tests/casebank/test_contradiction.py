"""Differences that hardly change two texts' cosine: numbers, negations, names and opposites, in English and Korean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.text.contradiction import MAX_CHARS, DifferenceKind, difference, features


@pytest.mark.parametrize(
    ("left", "right", "kind"),
    [
        ("wait 30 minutes", "wait 90 minutes", DifferenceKind.NUMBER),
        ("wait 3 minutes", "wait a few minutes", DifferenceKind.NUMBER),
        ("he has two cats", "he has three cats", DifferenceKind.NUMBER),
        ("version 3.11", "version 3.12", DifferenceKind.NUMBER),
        ("at 10:30", "at 10:45", DifferenceKind.NUMBER),
        ("call 821012345678901", "call 821012345678902", DifferenceKind.NUMBER),
        ("on 2024-01-02", "on 2024-01-03", DifferenceKind.NUMBER),
        ("3만원입니다", "5만원입니다", DifferenceKind.NUMBER),
        ("고양이 두 마리", "고양이 세 마리", DifferenceKind.NUMBER),
        ("I like coffee", "I do not like coffee", DifferenceKind.NEGATION),
        ("it works", "it doesn’t work", DifferenceKind.NEGATION),  # noqa: RUF001 (a typographic apostrophe)
        ("it is possible", "it is never possible", DifferenceKind.NEGATION),
        ("with sugar", "without sugar", DifferenceKind.NEGATION),
        ("커피를 좋아한다", "커피를 좋아하지 않는다", DifferenceKind.NEGATION),
        ("밥을 먹었다", "밥을 안 먹었다", DifferenceKind.NEGATION),
        ("시간이 있다", "시간이 없다", DifferenceKind.NEGATION),
        ("What is the capital of France?", "What is the capital of Germany?", DifferenceKind.NAME),
        ("Alice likes tea", "Bob likes tea", DifferenceKind.NAME),
        ("how do I deploy to AWS", "how do I deploy to GCP", DifferenceKind.NAME),
        ("How do I deploy?", "How do I deploy to Kubernetes?", DifferenceKind.NAME),
        ("서울 날씨 알려줘", "부산 날씨 알려줘", DifferenceKind.NAME),
        ("민수는 학생이다", "영희는 학생이다", DifferenceKind.NAME),
        ("김철수씨의 번호", "박영희씨의 번호", DifferenceKind.NAME),
        ("how to enable dark mode", "how to disable dark mode", DifferenceKind.OPPOSITE),
        ("turn the light on", "turn the light off", DifferenceKind.OPPOSITE),
        ("the meeting is on monday", "the meeting is on tuesday", DifferenceKind.OPPOSITE),
        ("i love it", "i hate it", DifferenceKind.OPPOSITE),
        ("알림을 켜는 방법", "알림을 끄는 방법", DifferenceKind.OPPOSITE),
        ("기능 활성화 방법", "기능 비활성화 방법", DifferenceKind.OPPOSITE),
        ("월요일에 만나", "화요일에 만나", DifferenceKind.OPPOSITE),
    ],
)
def test_a_difference_is_found_in_either_order(left: str, right: str, kind: DifferenceKind) -> None:
    """The order of the texts does not affect the kind of difference. Swapping the texts swaps `left` and `right`."""
    found, back = difference(left, right), difference(right, left)
    assert found is not None
    assert back is not None
    assert found.kind is back.kind is kind
    assert (found.left, found.right) == (back.right, back.left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("How do I reset my password?", "how can I reset my password"),
        ("The user prefers Python", "User prefers python"),
        ("1,000 users", "1000 users"),
        ("two cats", "2 cats"),
        ("it costs 5.50", "it costs 5.5"),
        ("Can't log in", "Cannot log in"),
        ("enable dark mode", "Enabling dark mode"),
        ("Where is Alice's office?", "where is the office of Alice"),
        ("비밀번호를 재설정하는 방법", "비밀번호 재설정 방법은?"),
        ("3만원", "30,000원"),
        ("1.5만원", "15000원"),
        ("0012.50 euros", "12.5 euros"),
        ("서울에서 날씨가 어때?", "서울의 날씨는 어때?"),
        ("", ""),
    ],
)
def test_paraphrases_do_not_differ(left: str, right: str) -> None:
    """No difference is found between paraphrases, because any difference prevents the merging of duplicates."""
    assert difference(left, right) is None


@given(st.text(max_size=60), st.text(max_size=60))
def test_differences_are_symmetric_and_consistent_for_any_text(left: str, right: str) -> None:
    """For any two texts, `difference` raises no error and is symmetric, and its result agrees with their `features`."""
    assert difference(left, left) is None
    found, back = difference(left, right), difference(right, left)
    assert (found is None) == (back is None)
    if found is not None and back is not None:
        assert (found.kind, found.left, found.right) == (back.kind, back.right, back.left)
        assert str(found)
    same_part = found is None or found.kind in {DifferenceKind.NAME, DifferenceKind.OPPOSITE}
    assert (features(left).fingerprint == features(right).fingerprint) is same_part
    if found is None or found.kind is DifferenceKind.OPPOSITE:
        assert not features(left).name_bits & ~features(right).word_bits
        assert not features(right).name_bits & ~features(left).word_bits


@pytest.mark.parametrize(("left", "right"), [("ask Anna", "ask Bob"), ("서울의 날씨는", "부산의 날씨는")])
def test_names_that_differ_differ_in_their_bits(left: str, right: str) -> None:
    """If `right` lacks a name of `left`, the `word_bits` of `right` usually lack one of the `name_bits` of `left`."""
    assert features(left).name_bits & ~features(right).word_bits


def test_the_fingerprint_is_the_same_everywhere() -> None:
    """Because a text's fingerprint may be stored, it is the same in every process, unlike Python's `hash`."""
    fingerprint = features("wait 30 minutes, not 90").fingerprint
    assert fingerprint == features("90 is not 30").fingerprint == 9_164_849_144_532_300_859


@pytest.mark.parametrize("filler", ["a ", "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"])
def test_one_character_beyond_the_size_limit_is_a_difference(filler: str) -> None:
    """Text beyond the size limit is compared by its hash, so one different character in it is a difference."""
    long = filler * MAX_CHARS
    found = difference(f"{long}left", f"{long}right")
    assert found is not None
    assert (found.kind, str(found).count("10,000")) == (DifferenceKind.REST, 2)
    assert features(f"{long}left").fingerprint != features(f"{long}right").fingerprint
    assert difference(long, long) is None
    assert difference("a", long) is not None


def test_a_difference_is_shown_within_bounds() -> None:
    """The text of a difference stays short even for thousands of different numbers, because a run's plan stores it."""
    assert len(str(difference(" ".join(map(str, range(1_500))), "none"))) < 500


def test_thousands_of_accents_are_compared() -> None:
    """Texts with thousands of accents on one letter are compared quickly. Equivalent forms of an accent match."""
    marks = "\N{COMBINING ACUTE ACCENT}\N{COMBINING CEDILLA}" * 2_000
    assert difference(f"cafe{marks} noir", f"cafe{marks} noir") is None
    assert difference("cafe\N{COMBINING ACUTE ACCENT} noir", "caf\N{LATIN SMALL LETTER E WITH ACUTE} noir") is None
