"""Settings can select breakers and a fallback strategy from a third party's installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.access.tenants import UserKey
from perdure.assembly import assemble, check
from perdure.clock import MovedClock
from perdure.errors import SettingsError
from perdure.models.protocol import Message, ModelCall, ModelRequest, Role
from perdure.models.resolve import Models
from perdure.resilience.circuit import CircuitState
from perdure.resilience.registry import Breakers, CircuitBreaker, Unguarded
from perdure.resilience.resolve import resolve
from perdure.runtime import Runtime
from perdure.sessions.reading import read_messages
from perdure.settings import Settings
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from tests.conftest import RecordingWaker
from tests.resilience import acme

REQUEST = ModelRequest((Message(Role.SYSTEM, "Be kind."), Message(Role.USER, "Hello")))

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
    """Write the metadata of an installed package, as pip does."""
    about = tmp_path / "acme-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def _settings(directory: Path, **given: Any) -> Settings:
    breaker = {"registry": "acme", **given.pop("breaker", {})}
    named = {"model": "acme:down", "fallback": "acme", "breaker": breaker, "data_dir": directory, **given}
    return Settings.model_validate(named)


def test_a_process_uses_the_third_partys_breakers_and_fallback(
    tmp_path: Path, database_url: str, waker: RecordingWaker
) -> None:
    """The third party's breaker counts the failing model's calls. Its strategy's reply is marked as a fallback."""
    settings = _settings(tmp_path)
    check(settings)
    made = assemble(settings, database_url, waker)
    try:
        assert isinstance(made.breakers, acme.Counters)
        turn, messages = _ask(made, "Hello?")
        assert (turn["status"], turn["reply"]["text"]) == ("done", "Acme answers.")
        assert (messages[-1]["model"], messages[-1]["fallback"]) == ("up", True)
        assert [(each.name, each.failure_count) for each in made.breakers.list()] == [
            ("llm:acme:up", 1),
            ("llm:acme:down", 1),
        ]
        turn, _ = _ask(made, "nobody knows")
        assert (turn["status"], turn["error"]["message"]) == ("failed", "Acme is down.")
        made.breakers.reset("llm:acme:down")  # calls perdure's listener; no turn waits for this breaker
    finally:
        made.database.close()


def _ask(made: Runtime, text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    accepted = accept(made, Incoming(user=UserKey("ana"), text=text))
    Runner(made, "harness").run(accepted.session_id)
    return read_turn(made.database, accepted.turn_id), read_messages(made.database, accepted.session_id)


def test_disabled_breakers_are_not_used(tmp_path: Path, clock: MovedClock) -> None:
    """`PERDURE_BREAKER__ENABLED=false` disables a third party's breakers, too."""
    found = resolve(_settings(tmp_path, breaker={"enabled": False}), clock, None, lambda _: None)
    assert isinstance(found, Breakers)
    assert isinstance(found.get("llm:acme:down"), Unguarded)
    assert isinstance(resolve(Settings(), clock, None, lambda _: None).get("llm:acme:down"), CircuitBreaker)


def test_a_fallback_of_the_same_provider_does_not_reset_the_breaker_of_the_dead_model(
    tmp_path: Path, clock: MovedClock
) -> None:
    """Each model has its own breaker, so that a fallback's successes do not reset the failing model's failure count."""
    limits = {"registry": "fleet", "failure_threshold": 2}
    once = {"max_attempts": 1}
    given = {"model": "acme:overloaded", "fallback": "models", "fallback_models": ("acme:up",)}
    settings = _settings(tmp_path, **given, breaker=limits, retry=once)
    breakers = Breakers(settings.breaker, clock)
    models = Models(settings, clock, breakers)
    acme.asked.clear()
    for _ in range(4):
        reply = models.get().respond(REQUEST, ModelCall(clock, 60))
        assert (reply.content, reply.model, reply.fallback) == ("Acme answers.", "up", True)
    assert acme.asked.count("acme:overloaded") == 2, "the model's breaker is open after two failures"
    states = {each.name: (each.state, each.success_count) for each in breakers.list()}
    assert states == {"llm:acme:overloaded": (CircuitState.OPEN, 0), "llm:acme:up": (CircuitState.CLOSED, 4)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"breaker": {"registry": "none"}}, "PERDURE_BREAKER__REGISTRY is 'none': accepted: fleet, acme, broken, or"),
        ({"breaker": {"registry": "broken"}}, "PERDURE_BREAKER__REGISTRY is 'broken': .*no_such_module"),
        ({"fallback": "none"}, "PERDURE_FALLBACK is 'none': accepted: models, acme, broken, or the name"),
        ({"fallback": "broken"}, "PERDURE_FALLBACK is 'broken': .*no_such_module"),
    ],
)
def test_an_unusable_name_stops_the_start(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    """If a setting names an unknown or broken entry point, startup fails. The error has the setting and its value."""
    with pytest.raises(SettingsError, match=message):
        check(_settings(tmp_path, **given))
