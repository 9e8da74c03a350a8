"""A cross-encoder scores pairs of texts in this process, within the time of the call."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from perdure.clock import MovedClock
from perdure.errors import DeadlineExceeded, ProviderError
from perdure.models import cross_encoders
from perdure.models.cross_encoders import load
from perdure.models.in_process import BATCH
from perdure.models.protocol import CallAborted, ModelCall

VARIABLE = "PERDURE_MEMORY__RERANKER"


class Predicted(list[Any]):
    """A stand-in for the array that `predict` returns."""

    def tolist(self) -> list[Any]:
        return list(self)


class Library:
    """A stand-in for `sentence_transformers.CrossEncoder`, with the members that perdure uses."""

    loaded = 0

    def __init__(self, model: str) -> None:
        if model == "missing":
            raise OSError("missing is not a local folder")
        type(self).loaded += 1
        self.model = model
        names = {0: "LABEL_0"} if model == "scores" else {1: "entailment", 0: "Contradiction", 2: "neutral"}
        self.config = SimpleNamespace(id2label=names)

    def predict(
        self, inputs: list[tuple[str, str]], *, batch_size: int, show_progress_bar: bool, activation_fn: Any
    ) -> Predicted:
        assert len(inputs) <= batch_size == BATCH
        assert not show_progress_bar
        if self.model == "huge":
            raise RuntimeError("out of memory")
        found = [float(len(one) - len(other)) for one, other in inputs]
        return Predicted(activation_fn(found if self.model == "scores" else [[each, 0.0, -each] for each in found]))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitute for the library, which needs PyTorch and is not installed for tests."""
    module = ModuleType("sentence_transformers")
    module.CrossEncoder = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(Library, "loaded", 0)
    cross_encoders._load.cache_clear()


def _call(timeout_s: float = 60) -> ModelCall:
    return ModelCall(MovedClock(), timeout_s)


def test_each_label_has_a_score() -> None:
    """The labels are in the order of the scores, in lower case."""
    found = load("nli", VARIABLE)
    assert found.labels == ("contradiction", "entailment", "neutral")
    assert found.scores([("abc", "a"), ("a", "a")], _call()) == [[2.0, 0.0, -2.0], [0.0, 0.0, 0.0]]


def test_a_model_with_one_score() -> None:
    """The library returns a number for each pair then. More pairs than a batch keep their order."""
    pairs = [("x" * number, "y") for number in range(1, 2 * BATCH + 1)]
    assert load("scores", VARIABLE).scores(pairs, _call()) == [[float(number)] for number in range(2 * BATCH)]


def test_what_cannot_be_encoded_is_replaced() -> None:
    """No tokenizer takes half a character, nor an empty text."""
    assert load("scores", VARIABLE).scores([("\ud800", "")], _call()) == [[0.0]]


def test_a_process_loads_a_model_once() -> None:
    """The reranker and the judge may name the same one."""
    assert load("nli", VARIABLE) is load("nli", VARIABLE)
    assert Library.loaded == 1


def test_a_failing_library_is_a_provider_error() -> None:
    with pytest.raises(ProviderError, match="cross-encoder failed"):
        load("huge", VARIABLE).scores([("a", "b")], _call())


def test_the_call_limits_the_time() -> None:
    """Neither an aborted call nor one whose time is over asks the library."""
    clock = MovedClock()
    over, aborted = ModelCall(clock, 1), ModelCall(clock, 60)
    aborted.abort()
    clock.advance(timedelta(seconds=2))
    with pytest.raises(DeadlineExceeded):
        load("huge", VARIABLE).scores([("a", "b")], over)
    with pytest.raises(CallAborted):
        load("huge", VARIABLE).scores([("a", "b")], aborted)


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ProviderError, match=rf"{VARIABLE} is 'cross-encoder:nli': .*perdure\[sentence-transformers\]"):
        load("nli", VARIABLE)


def test_says_which_model_cannot_be_loaded() -> None:
    with pytest.raises(ProviderError, match=rf"{VARIABLE} is 'cross-encoder:missing'.*not a local folder"):
        load("missing", VARIABLE)
