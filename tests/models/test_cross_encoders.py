"""A cross-encoder scores pairs of texts in this process, within the time of the call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from perdure.clock import MovedClock, SystemClock
from perdure.errors import DeadlineExceeded, ProviderError
from perdure.models import cross_encoders
from perdure.models.cross_encoders import CrossEncoder, Loader
from perdure.models.protocol import CallAborted, ModelCall


class Predicted(list[Any]):
    """A stand-in for the array that `predict` returns."""

    def tolist(self) -> list[Any]:
        return list(self)


class Library:
    """A stand-in for `sentence_transformers.CrossEncoder`, with the members that perdure uses."""

    loaded: ClassVar[list[str]] = []
    ready = threading.Event()
    errors: ClassVar[dict[str, Exception]] = {
        "missing": OSError("missing is not a local folder"),
        "broken": RuntimeError("size mismatch"),
    }

    def __init__(self, model: str) -> None:
        self.loaded.append(model)
        assert self.ready.wait(20)
        if model in self.errors:
            raise self.errors[model]
        self.model = model
        names = {0: "LABEL_0"} if model == "scores" else {1: "entailment", 0: "Contradiction", 2: "neutral"}
        self.config = SimpleNamespace(id2label=names)

    def predict(
        self, inputs: list[tuple[str, str]], *, batch_size: int, show_progress_bar: bool, activation_fn: Any
    ) -> Predicted:
        assert len(inputs) <= batch_size
        assert not show_progress_bar
        if self.model == "huge":
            raise IndexError("index out of range in self")
        found = [float(len(one.encode()) - len(other.encode())) for one, other in inputs]
        return Predicted(activation_fn(found if self.model == "scores" else [[each, 0.0, -each] for each in found]))


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A substitute for the library, which needs PyTorch and is not installed for tests."""
    module = ModuleType("sentence_transformers")
    module.CrossEncoder = Library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    Library.loaded.clear()
    Library.ready.set()
    yield
    Library.ready.set()


def _call(timeout_s: float = 60) -> ModelCall:
    return ModelCall(MovedClock(), timeout_s)


def _loaded(model: str) -> CrossEncoder:
    return Loader().load(model, _call())


def test_each_label_has_a_score() -> None:
    """The labels are in the order of the scores, in lower case."""
    found = _loaded("nli")
    assert found.labels == ("contradiction", "entailment", "neutral")
    assert found.scores([("abc", "a"), ("a", "a")], _call()) == [[2.0, 0.0, -2.0], [0.0, 0.0, 0.0]]


def test_a_model_with_one_score() -> None:
    """The library returns a number for each pair then. More pairs than a batch keep their order."""
    pairs = [("x" * number, "y") for number in range(1, 40)]
    assert _loaded("scores").scores(pairs, _call()) == [[float(number)] for number in range(39)]


def test_what_cannot_be_encoded_is_replaced() -> None:
    """No tokenizer takes half a character, nor an empty text."""
    [[score]] = _loaded("scores").scores([("\ud800", "")], _call())
    assert score >= 0


@pytest.mark.parametrize("calls", [1, 3])
def test_a_process_loads_a_model_once(calls: int) -> None:
    """Also if several threads ask at once."""
    loader = Loader()
    found: list[CrossEncoder] = []
    threads = [threading.Thread(target=lambda: found.append(loader.load("nli", _call()))) for _ in range(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == calls
    assert {*map(id, found)} == {id(loader.load("nli", _call()))}
    assert Library.loaded == ["nli"]


def test_a_call_waits_within_its_time_for_a_model_that_is_being_loaded() -> None:
    """Loading goes on. Meanwhile, a model that is there is used."""
    loader = Loader()
    there = loader.load("scores", _call())
    Library.ready.clear()
    with pytest.raises(DeadlineExceeded):
        loader.load("nli", ModelCall(SystemClock(), 0.05))
    assert loader.load("scores", _call()) is there
    Library.ready.set()
    assert loader.load("nli", _call()).labels
    assert Library.loaded == ["scores", "nli"]


def test_an_aborted_call_does_not_wait() -> None:
    """A shutdown or a cancellation ends the wait."""
    Library.ready.clear()
    call = _call()
    threading.Timer(0.05, call.abort).start()
    with pytest.raises(CallAborted):
        Loader().load("nli", call)


def test_a_failing_library_is_a_provider_error() -> None:
    """Whatever it raises."""
    with pytest.raises(ProviderError, match="cross-encoder failed"):
        _loaded("huge").scores([("a", "b")], _call())


def test_the_call_limits_the_time() -> None:
    """Neither an aborted call nor one whose time is over asks the library."""
    model, clock = _loaded("huge"), MovedClock()
    over, aborted = ModelCall(clock, 1), ModelCall(clock, 60)
    aborted.abort()
    clock.advance(timedelta(seconds=2))
    with pytest.raises(DeadlineExceeded):
        model.scores([("a", "b")], over)
    with pytest.raises(CallAborted):
        model.scores([("a", "b")], aborted)


@pytest.mark.parametrize(
    ("model", "transient", "said"),
    [("missing", True, "not a local folder"), ("broken", False, "size mismatch")],
)
def test_a_failure_to_load_is_remembered_for_a_while(
    model: str, transient: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that cannot be reached is not asked by each recall."""
    loader = Loader()
    for _ in range(2):
        with pytest.raises(ProviderError, match=rf"cross-encoder:{model} cannot be loaded: .*{said}") as caught:
            loader.load(model, _call())
        assert caught.value.transient is transient
    assert Library.loaded == [model]
    monkeypatch.setattr(cross_encoders, "RETRY_S", 0.0)
    with pytest.raises(ProviderError):
        loader.load(model, _call())
    assert Library.loaded == [model, model]


def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra may have been removed since the start of the process."""
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ProviderError, match=r"cross-encoder:nli: .*perdure\[sentence-transformers\]"):
        _loaded("nli")
