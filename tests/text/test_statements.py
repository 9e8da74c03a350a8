"""The rules repeat no statement that differs in a word that carries meaning, whatever the language."""

from __future__ import annotations

import pytest

from perdure.text.statements import Relation, read, relate

DIFFERENT = (
    ("Ich fahre im Juni nach Rom.", "Ich fahre im Juli nach Rom."),
    ("Viajo a Roma en junio.", "Viajo a Roma en julio."),
    ("Bebo café por la mañana.", "Bebo zumo por la mañana."),
    ("J'aime le café.", "J'aime le thé."),
    ("会議は毎週です。", "会議は毎月です。"),
    ("会議は月曜日です。", "会議は火曜日です。"),
    ("母はうどんが好きです。", "母はそばが好きです。"),
    ("肉を食べると言いました。", "肉を食べないと言いました。"),
    ("我结婚了。", "我没结婚。"),
    ("会议在星期一。", "会议在星期二。"),
    ("我每天跑步。", "我每周跑步。"),
    ("회의는 매주 있어요.", "회의는 매달 있어요."),
    ("I have a good doctor.", "I have a bad doctor."),
    ("My sister lives in Lyon.", "My brother lives in Lyon."),
    ("I am allergic to nuts.", "I am allergic to cats."),
    ("", "I live in Lyon."),
)


@pytest.mark.parametrize(("earlier", "later"), DIFFERENT)
def test_what_differs_is_not_repeated(earlier: str, later: str) -> None:
    """A rule that took one for the other would reinforce what is not true."""
    assert relate(earlier, later) is not Relation.SAME
    assert relate(later, earlier) is not Relation.SAME


@pytest.mark.parametrize(
    ("text", "subject", "attribute", "value"),
    [
        ("I live in Lyon.", "user", "home", {"lyon"}),
        ("My sister lives in Lyon.", "sister", "home", {"lyon"}),
        ("Nora works at Contoso.", "nora", "employer", {"contoso"}),
        ("Ich bin nach Hamburg gezogen.", "user", "home", {"hamburg"}),
        ("Mi perro se llama Toby.", "dog", "name", {"toby"}),
        ("제 여동생은 부산에 살아요.", "sister", "home", {"부산"}),
        ("東京に引っ越しました。", "user", "home", {"東京"}),
        ("我在华为工作。", "user", "employer", {"华为"}),
        ("I am 34 years old.", "user", "age", {"34"}),
        ("My boss is strict.", "user", None, set()),
    ],
)
def test_subjects_and_attributes_are_read(text: str, subject: str, attribute: str | None, value: set[str]) -> None:
    """A statement's subject, its attribute and the words of the value, in six languages."""
    found = read(text)
    assert (found.subject, found.attribute, {*found.value}) == (subject, attribute, value)
