"""`PERDURE_MODEL` selects a model."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from perdure.clock import Clock, SystemClock
from perdure.errors import SettingsError
from perdure.models import resolve as resolving
from perdure.models.offline import OfflineModel
from perdure.models.protocol import Model
from perdure.models.resolve import Models, resolve
from perdure.settings import Settings


class Acme(OfflineModel):
    """A third party's model."""

    def __init__(self, model: str) -> None:
        self._model = model

    @property
    def name(self) -> str:
        return f"acme:{self._model}"


def acme(model: str, settings: Settings, clock: Clock) -> Model:
    """The function that the entry point `acme` loads; returns a third party's model."""
    return Acme(model)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages with one entry point each. The module of the second entry point is missing."""
    points = [
        EntryPoint("acme", f"{__name__}:acme", resolving.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:model", resolving.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: EntryPoints(points))
    monkeypatch.setattr(resolving, "entry_points", importlib.metadata.entry_points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: acme if self.name == "acme" else _missing())


def _missing() -> None:
    raise ModuleNotFoundError("No module named 'no_such_module'")


@pytest.mark.parametrize("name", ["", "gpt-5", "openai", "openai:", "offline:x", "anthropic:", "Offline"])
def test_an_unknown_name_says_what_is_accepted(name: str) -> None:
    """An unknown name is refused. The error contains the setting, its value and the accepted values."""
    with pytest.raises(SettingsError) as caught:
        resolve(name, Settings(), SystemClock())
    assert str(caught.value).startswith(f"PERDURE_MODEL is {name!r}: accepted: offline, openai:NAME, anthropic:NAME")


def test_a_third_party_adds_a_provider_by_entry_point(installed: None) -> None:
    """An installed package can add a provider of models."""
    assert resolve("acme:large", Settings(), SystemClock()).name == "acme:large"
    with pytest.raises(SettingsError, match="acme:NAME"):
        resolve("nope:x", Settings(), SystemClock())


def test_an_entry_point_that_cannot_be_loaded_says_why(installed: None) -> None:
    """If an entry point cannot be loaded, the error says why."""
    with pytest.raises(SettingsError, match="no_such_module"):
        resolve("broken:x", Settings(), SystemClock())


def test_a_process_makes_each_model_once() -> None:
    """A process creates each model once, so that the turns of the process share connections."""
    models = Models(Settings(model="offline"), SystemClock())
    assert models.get() is models.get("offline")
