"""Memories follow what changes, in several languages, with good and bad extraction models and with the rules alone."""

from __future__ import annotations

from collections import Counter

import pytest

from perdure.memory.consolidation.candidates import Decision
from perdure.memory.consolidation.judging import Pair, Topic, guard, settle
from perdure.models.embedders.hashing import HashEmbedder
from perdure.models.embedders.protocol import Embedder
from perdure.models.embedders.static import StaticEmbedder
from perdure.text.statements import Relation
from tests.memory.archive import Archive
from tests.memory.changes import (
    LOOK_ALIKE,
    OTHER_SEQUENCES,
    PARAPHRASE,
    SEQUENCES,
    Decide,
    Sequence2,
    bad,
    bad_with_attributes,
    figures,
    good,
)


def test_the_set_is_large_enough() -> None:
    """The set has at least 200 sequences in six languages, of every kind in each language. None occurs twice."""
    kinds = {"home", "job", "name", "allergy", "number", "plan", "taste", PARAPHRASE, LOOK_ALIKE}
    assert len(SEQUENCES) >= 200
    assert len({(each.earlier, each.later) for each in SEQUENCES}) == len(SEQUENCES)
    counted = Counter((each.language, each.kind) for each in SEQUENCES)
    assert {language for language, _ in counted} == {"en", "de", "es", "ko", "ja", "zh"}
    assert all(counted[language, kind] >= 2 for language, _ in counted for kind in kinds), counted


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("decide", "superseded", "merged"),
    [
        pytest.param(good, 0.95, 0.9, id="good model", marks=pytest.mark.long),
        pytest.param(None, 0.8, 0.6, id="rules alone", marks=pytest.mark.long),
        pytest.param(bad, 0.8, 0.0, id="bad model", marks=pytest.mark.long),
        pytest.param(bad_with_attributes, 0.8, 0.0, id="bad model that names attributes", marks=pytest.mark.long),
    ],
)
def test_memories_follow_what_changes(
    archive: Archive, decide: Decide | None, superseded: float, merged: float
) -> None:
    """Whatever the model says, no contradiction reinforces a memory and no look-alike touches one.

    A bad model, which calls each repetition a change, costs repetitions: they are stored again. It hides no change that
    the rules find.
    """
    found = figures(archive, SEQUENCES, decide)
    assert found.reinforced == []
    assert found.touched == []
    assert found.superseded >= superseded, found.missed
    assert found.merged >= merged, found.missed


@pytest.mark.parametrize("embedder", [HashEmbedder(384), StaticEmbedder()], ids=["hash", "static"])
@pytest.mark.parametrize(
    ("decide", "superseded", "merged"),
    [
        pytest.param(good, 0.95, 0.9, id="good model"),
        pytest.param(None, 0.8, 0.6, id="rules alone"),
        pytest.param(bad, 0.8, 0.0, id="bad model"),
        pytest.param(bad_with_attributes, 0.8, 0.0, id="bad model that names attributes"),
    ],
)
def test_other_words_and_languages_reach_the_same(
    embedder: Embedder, decide: Decide | None, superseded: float, merged: float
) -> None:
    """The second set, without the database: what decides about two statements alone."""
    relations = [(each, _settled(embedder, each, decide)) for each in OTHER_SEQUENCES]
    changes = [found for sequence, found in relations if sequence.is_change]
    repeated = [found for sequence, found in relations if sequence.kind == PARAPHRASE]
    assert [each for each, found in relations if each.is_change and found is Relation.SAME] == []
    touched = (Relation.SAME, Relation.CHANGES)
    assert [each for each, found in relations if each.kind == LOOK_ALIKE and found in touched] == []
    assert changes.count(Relation.CHANGES) >= superseded * len(changes)
    assert repeated.count(Relation.SAME) >= merged * len(repeated)


def _settled(embedder: Embedder, sequence: Sequence2, decide: Decide | None) -> Relation:
    vectors = embedder.embed([sequence.earlier, sequence.later])
    similarity = sum(one * other for one, other in zip(*vectors, strict=True))
    pair = Pair(sequence.earlier, sequence.later, similarity)
    said, tells = (None, False) if decide is None else decide(sequence)
    decision = None if said is None else Decision(said)
    named = sequence.attribute or ("hobby" if decision is not Decision.NEW else "")
    subject, attribute = ("user", named) if tells and named else ("", "")
    topics = (Topic.of(sequence.earlier, subject, attribute), Topic.of(sequence.later, subject, attribute))
    is_named = decision not in (None, Decision.NEW)
    return settle(pair, guard(pair, 0.92), decision, topics, is_named=is_named).relation
