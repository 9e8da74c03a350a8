"""A reranker puts what recall has found into the order in which it answers the question."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from perdure import assembly, plugins
from perdure.access.tenants import UserKey
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import ContentFiltered, ProviderError, SettingsError
from perdure.memory.recall.reranking import (
    MOST_RERANKED,
    CrossEncoderReranker,
    ModelReranker,
    Reranker,
    resolve_reranker,
)
from perdure.memory.recall.search import Recall
from perdure.models.offline import OfflineModel
from perdure.models.protocol import CallAborted, Model, ModelCall
from perdure.settings import MemorySettings, Settings
from tests.memory.corpus import import_conversation
from tests.turns.harness import Harness
from tests.turns.scripted import Line, Scripted, says

BOATS = [f"My boat number {number} is called {name}." for number, name in enumerate(("Ada", "Bea", "Cleo", "Dora"), 1)]
QUESTION = "What is the name of my boat?"


def _recall(database: Database, clock: MovedClock, reranker: Reranker | None) -> Recall:
    return Recall(database, None, MemorySettings(), clock, reranker=reranker)


def _asking(*lines: Line) -> tuple[Scripted, ModelReranker]:
    model = Scripted(*lines)
    return model, ModelReranker(lambda: model)


class Reversing:
    """Puts the last text first, and names positions that do not exist."""

    def __init__(self) -> None:
        self.given: list[Sequence[str]] = []

    def rank(self, question: str, texts: Sequence[str], call: ModelCall) -> Sequence[int]:
        assert question == QUESTION
        assert 0 < call.remaining() <= MemorySettings().recall_timeout_s
        self.given.append(texts)
        return [-1, 99, *range(len(texts))[::-1]]


def test_the_model_orders_what_was_found(database: Database, clock: MovedClock) -> None:
    """The texts that it names come first, the others follow as they were. Scores fall, as without a reranker."""
    import_conversation(database, clock, BOATS)
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)
    model, reranker = _asking(says("Here you are:\n```json\n[3, 1]\n```"))
    found = _recall(database, clock, reranker).search(UserKey("ana"), QUESTION, 4)
    assert [each.id for each in found] == [plain[at].id for at in (2, 0, 1, 3)]
    assert [each.score for each in found] == [each.score for each in plain]
    asked = model.requests[0].messages[-1].content
    assert QUESTION in asked
    assert f'3. "{plain[2].content}"' in asked


@pytest.mark.parametrize(
    "line",
    [
        says("The third one."),
        says("[0]"),
        says("[5]"),
        says("[true]"),
        says('["1"]'),
        says(""),
        ProviderError("It is down."),
        ContentFiltered("No."),
    ],
    ids=["prose", "zero", "too large", "truth", "text", "empty", "down", "filtered"],
)
def test_without_a_usable_answer_the_order_stays(
    database: Database, clock: MovedClock, line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    """Recall works without its reranker, and the log says that it did."""
    import_conversation(database, clock, BOATS)
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)
    _model, reranker = _asking(line)
    assert _recall(database, clock, reranker).search(UserKey("ana"), QUESTION, 4) == plain
    assert "the reranker is unavailable" in caplog.text


def test_a_reranker_may_raise_anything(
    database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault of another package's reranker fails no turn."""
    import_conversation(database, clock, BOATS)
    monkeypatch.setattr(Reversing, "rank", lambda *_: dict[str, Any]()["rank"])
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)
    assert _recall(database, clock, Reversing()).search(UserKey("ana"), QUESTION, 4) == plain
    assert "the reranker is unavailable" in caplog.text


def test_an_abort_is_passed_on(database: Database, clock: MovedClock) -> None:
    """A shutdown or a cancellation ends the recall."""
    import_conversation(database, clock, BOATS)
    _model, reranker = _asking(CallAborted("The process shuts down."))
    with pytest.raises(CallAborted):
        _recall(database, clock, reranker).search(UserKey("ana"), QUESTION, 4)


def test_it_chooses_from_more_than_is_wanted(database: Database, clock: MovedClock) -> None:
    """It reads up to `MOST_RERANKED` texts, whatever `k` is. Results behind them keep their places."""
    import_conversation(database, clock, [f"My boat number {number} has a name." for number in range(40)])
    reversing = Reversing()
    recall = _recall(database, clock, reversing)
    best = recall.search(UserKey("ana"), QUESTION, 1)
    all_found = recall.search(UserKey("ana"), QUESTION, 40)
    assert [len(texts) for texts in reversing.given] == [MOST_RERANKED, MOST_RERANKED]
    assert best[0].content == reversing.given[0][-1]
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 40)
    assert [each.id for each in all_found[MOST_RERANKED:]] == [each.id for each in plain[MOST_RERANKED:]]
    assert len({each.id for each in all_found}) == 40


def test_nothing_to_order_is_not_asked_about(database: Database, clock: MovedClock) -> None:
    """No result and a single result cost no call."""
    model, reranker = _asking()
    recall = _recall(database, clock, reranker)
    assert recall.search(UserKey("ana"), QUESTION, 4) == []
    import_conversation(database, clock, BOATS[:1])
    assert len(recall.search(UserKey("ana"), QUESTION, 4)) == 1
    assert model.requests == []


class Rare:
    """A cross-encoder that prefers the boat Dora."""

    labels = ("label_0",)

    def scores(self, pairs: Sequence[tuple[str, str]], call: ModelCall) -> list[list[float]]:
        assert call.remaining() > 0
        assert {one for one, _ in pairs} == {QUESTION}
        return [[float("Dora" in other)] for _, other in pairs]


def test_a_cross_encoder_puts_the_highest_score_first(database: Database, clock: MovedClock) -> None:
    """It is loaded at the first recall that has something to order. Equal scores keep their order."""
    import_conversation(database, clock, BOATS)
    loaded: list[Rare] = []

    def load(call: ModelCall) -> Any:
        loaded.append(Rare())
        return loaded[-1]

    recall = _recall(database, clock, CrossEncoderReranker(load))
    assert recall.search(UserKey("ana"), "zebras", 4) == []
    assert loaded == []
    plain = [each.id for each in _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)]
    found = recall.search(UserKey("ana"), QUESTION, 4)
    assert len(loaded) == 1
    assert "Dora" in found[0].content
    assert found[0].id != plain[0]
    assert [each.id for each in found[1:]] == [each for each in plain if each != found[0].id]


def test_a_cross_encoder_with_several_scores_leaves_the_order(
    database: Database, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A model of entailment says nothing about how well a text answers."""
    import_conversation(database, clock, BOATS)
    labels = ("contradiction", "neutral")
    several: Any = SimpleNamespace(labels=labels, scores=lambda pairs, _: [[0.0, 1.0]] * len(pairs))
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)
    recall = _recall(database, clock, CrossEncoderReranker(lambda _: several))
    assert recall.search(UserKey("ana"), QUESTION, 4) == plain
    assert "the labels contradiction, neutral: accepted: one with a single score" in caplog.text


def test_a_cross_encoder_that_cannot_be_loaded_leaves_the_order(
    database: Database, clock: MovedClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the setting and the way out."""
    import_conversation(database, clock, BOATS)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    named = _named(Settings(_env_file=None), "cross-encoder:mini")
    recall = _recall(database, clock, resolve_reranker(named, OfflineModel))
    plain = _recall(database, clock, None).search(UserKey("ana"), QUESTION, 4)
    assert recall.search(UserKey("ana"), QUESTION, 4) == plain
    assert "cross-encoder:mini: it needs the extra" in caplog.text


def _named(settings: Settings, name: str) -> Settings:
    return settings.model_copy(update={"memory": settings.memory.model_copy(update={"reranker": name})})


def test_a_reranker_is_chosen_by_its_setting(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point gets the settings and a function that returns the summary model."""

    def load() -> Callable[..., Any]:
        return lambda settings, model: (settings, model().name)

    class Found(dict[str, Any]):
        names = frozenset({"acme"})

    found = Found(acme=SimpleNamespace(name="acme", load=load))
    monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == "perdure.rerankers" else Found())

    def model() -> Model:
        return OfflineModel()

    assert resolve_reranker(settings, model) is None
    assert isinstance(resolve_reranker(_named(settings, "model"), model), ModelReranker)
    made: Any = resolve_reranker(_named(settings, "acme"), model)
    assert made == (_named(settings, "acme"), "offline")


@pytest.mark.parametrize("setting", ["judge", "reranker"])
def test_an_unknown_name_stops_the_program_at_its_start(settings: Settings, setting: str) -> None:
    """The message has the accepted names."""
    memory = settings.memory.model_copy(update={setting: "nobody"})
    with pytest.raises(SettingsError, match=f"PERDURE_MEMORY__{setting.upper()} is 'nobody': accepted: .*model"):
        assembly.check(settings.model_copy(update={"memory": memory}))


@pytest.mark.parametrize("setting", ["judge", "reranker"])
def test_a_missing_extra_stops_the_program_at_its_start(
    settings: Settings, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library of cross-encoders needs PyTorch."""
    monkeypatch.setattr(plugins, "find_spec", lambda _: None)
    memory = settings.memory.model_copy(update={setting: "cross-encoder:mini"})
    wanted = rf"PERDURE_MEMORY__{setting.upper()} is 'cross-encoder:mini': .*pip install 'perdure\[sentence-tr"
    with pytest.raises(SettingsError, match=wanted):
        assembly.check(settings.model_copy(update={"memory": memory}))


def test_a_prompt_has_what_the_reranker_puts_first(harness: Harness) -> None:
    """The model of a turn gets the recalled messages in the reranker's order."""
    import_conversation(harness.database, harness.clock, BOATS, harness.runtime.embedder)
    memory = harness.settings.memory.model_copy(update={"reranker": "model"})
    harness.settings = harness.settings.model_copy(update={"memory": memory})
    harness.script(says("[4]"), says("She is called Dora."))
    sent = harness.send(QUESTION)
    harness.run(sent.session_id)
    ranked, asked = harness.model.requests
    fourth = ranked.messages[-1].content.splitlines()[4].partition(". ")[2].strip('"')
    note = "\n".join(each.content for each in asked.messages)
    assert min(note.index(boat) for boat in BOATS) == note.index(fourth)
