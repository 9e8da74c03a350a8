"""Breakers and a fallback of somebody else's, for those who run perdure: installed, named by a setting, used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.clock import MovedClock
from perdure.errors import SettingsError
from perdure.resilience.registry import Breakers, CircuitBreaker, Unguarded
from perdure.resilience.resolve import resolve
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from perdure.settings import Settings
from perdure.turns.inbox import accept
from perdure.turns.incoming import Incoming
from perdure.turns.reading import read_turn
from perdure.turns.runner import Runner
from tests.conftest import RecordingWaker
from tests.resilience import acme
from workers.assembly import assemble, check

ENTRY_POINTS = f"""
[perdure.breakers]
acme = {acme.__name__}:Counters
broken = no_such_module:breakers
[perdure.fallbacks]
acme = {acme.__name__}:OneAnswer
broken = no_such_module:fallback
[perdure.models]
acme = {acme.__name__}:model
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip would leave it."""
    about = tmp_path / "acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def _settings(directory: Path, **given: Any) -> Settings:
    breaker = {"registry": "acme", **given.pop("breaker", {})}
    named = {"model": "acme:down", "fallback": "acme", "breaker": breaker, "data_dir": directory, **given}
    return Settings.model_validate(named)


def test_a_process_goes_by_them(tmp_path: Path, database_url: str, waker: RecordingWaker) -> None:
    """The turn's model is down: their breaker counts the calls, their strategy answers, and its answer is marked."""
    settings = _settings(tmp_path)
    check(settings)
    made = assemble(settings, database_url, waker)
    try:
        assert isinstance(made.breakers, acme.Counters)
        turn, messages = _ask(made, "Hello?")
        assert (turn["status"], turn["reply"]["text"]) == ("done", "Acme answers.")
        assert (messages[-1]["model"], messages[-1]["fallback"]) == ("up", True)
        assert [(each.name, each.failure_count) for each in made.breakers.list()] == [("llm:acme", 2)]
        turn, _ = _ask(made, "nobody knows")
        assert (turn["status"], turn["error"]["message"]) == ("failed", "Acme is down.")
        made.breakers.reset("llm:acme")  # tells perdure, which has nothing parked
    finally:
        made.database.close()


def _ask(made: Runtime, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    accepted = accept(made, Incoming(user_id="ana", text=text))
    Runner(made, "stage").run(accepted.session_id)
    return read_turn(made.database, accepted.turn_id), read_messages(made.database, accepted.session_id)


def test_switched_off_nobodys_breakers_are_asked(tmp_path: Path, clock: MovedClock) -> None:
    """One switch for all."""
    found = resolve(_settings(tmp_path, breaker={"enabled": False}), clock, None, lambda _: None)
    assert isinstance(found, Breakers)
    assert isinstance(found.get("llm:acme"), Unguarded)
    assert isinstance(resolve(Settings(), clock, None, lambda _: None).get("llm:acme"), CircuitBreaker)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"breaker": {"registry": "none"}}, "PERDURE_BREAKER__REGISTRY is 'none': accepted: fleet, acme, broken, or"),
        ({"breaker": {"registry": "broken"}}, "PERDURE_BREAKER__REGISTRY is 'broken': .*no_such_module"),
        ({"fallback": "none"}, "PERDURE_FALLBACK is 'none': accepted: models, acme, broken, or the name"),
        ({"fallback": "broken"}, "PERDURE_FALLBACK is 'broken': .*no_such_module"),
    ],
)
def test_what_cannot_be_had_stops_the_start(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    """With the variable, its value, and what would be right; not at the outage that it was meant for."""
    with pytest.raises(SettingsError, match=said):
        check(_settings(tmp_path, **given))
