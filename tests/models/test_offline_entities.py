"""The entities and relations that the offline model finds."""

from __future__ import annotations

import pytest

from perdure.models.offline.entities import entities, relations


@pytest.mark.parametrize(
    ("sentence", "named", "related"),
    [
        ("I live in Lyon.", [("Lyon", "place")], [("user", "live_in", "Lyon")]),
        (
            "My sister Nora lives in New York.",
            [("Nora", "person"), ("New York", "place")],
            [("user", "sister", "Nora"), ("Nora", "lives_in", "New York")],
        ),
        ("I think that I'm late.", [], []),
        ("I like tea.", [], []),
        ("My dog is called Rex.", [("Rex", "thing")], [("user", "dog", "Rex")]),
        ("저는 서울에 살아요.", [], []),
    ],
)
def test_names_and_how_they_belong_together(
    sentence: str, named: list[tuple[str, str]], related: list[tuple[str, str, str]]
) -> None:
    """The offline model finds the entities in a sentence, their types and the relations between them."""
    found = {each["name"]: each["type"] for each in entities(sentence)}
    assert [*found] == [name for name, _ in named]
    assert [(each["subject"], each["relation"], each["object"]) for each in relations(sentence)] == related
