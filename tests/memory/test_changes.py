"""Memories follow what changes, in six languages, with a good and a bad extraction model and with the rules alone."""

from __future__ import annotations

from collections import Counter

import pytest

from perdure.settings import Settings
from perdure.turns.lease.keeper import Keeper
from tests.memory.archive import Archive
from tests.memory.changes import LOOK_ALIKE, PARAPHRASE, SEQUENCES, Decide, bad, bad_with_attributes, figures, good
from tests.turns.harness import Harness


@pytest.fixture
def archive(harness: Harness, settings: Settings) -> Archive:
    """An `Archive` that has no sessions yet."""
    harness.check = lambda: None  # type: ignore[method-assign]  # the check would fail: no turn ran
    return Archive(harness, Keeper(harness.database, harness.clock, settings.turn))


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
