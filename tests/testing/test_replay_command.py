"""`perdure turns replay` runs an exported turn again in an empty environment, and says where it departs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure import Agent, tool
from perdure.agents import Agents
from perdure.errors import SettingsError
from perdure.testing import recorded
from perdure.turns.recording import record
from tests.repository.source import ROOT
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

AGENTS = """
from perdure import Agent, tool

@tool(effect="unsafe")
def pay(amount: int) -> str:
    '''Pay an amount.'''
    raise AssertionError("a tool runs")

cashier = Agent("cashier", "You pay.{more}", [pay], max_steps=2)
"""


@tool(effect="unsafe")
def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


@pytest.fixture
def bundle(harness: Harness, tmp_path: Path) -> Path:
    """A turn that failed at its limit of steps, after two calls."""
    harness.agents = Agents([Agent("cashier", "You pay.", [pay], max_steps=2)])
    harness.script(calls(("pay", {"amount": 5})), calls(("pay", {"amount": 7})), says("never asked"))
    turn = harness.ask("pay 12", agent="cashier")
    assert turn["error"]["code"] == "BUDGET_EXHAUSTED"
    written = tmp_path / "failed.json"
    written.write_text(json.dumps(record(harness.runtime, turn["turn_id"])), encoding="utf-8")
    return written


def _replay(bundle: Path, more: str = "", *options: str, agents: str | None = None) -> subprocess.CompletedProcess[str]:
    (bundle.parent / "cashiers.py").write_text(AGENTS.format(more=more), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "PERDURE_AGENTS": agents or "cashiers", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "perdure.cli", "turns", "replay", bundle.name, *options]
    return subprocess.run(command, cwd=bundle.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_an_unchanged_agent_fails_alike(bundle: Path) -> None:
    """No tool runs, and no server is there."""
    done = _replay(bundle)
    assert (done.returncode, done.stdout) == (0, "no difference\n"), done.stderr


@pytest.mark.long
def test_a_changed_agent_departs(bundle: Path) -> None:
    done = _replay(bundle, " Quickly.", "--json")
    told: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode, told["departs"], told["status"]) == (1, True, None)
    assert told["instructions"] == ["- You pay.", "+ You pay. Quickly."]


@pytest.mark.exhaustive
def test_what_cannot_be_replayed_is_refused_in_a_sentence(bundle: Path) -> None:
    done = _replay(bundle, agents="perdure.builtin")
    assert done.returncode == 2
    assert "has no agent 'cashier': --agent names one" in done.stderr
    bundle.write_text("{}", encoding="utf-8")
    assert "this is no recorded turn" in _replay(bundle).stderr


@pytest.mark.exhaustive
def test_the_turns_of_an_exported_session(harness: Harness, tmp_path: Path) -> None:
    """Each is shown with its id, and one that departs is enough for the status 1."""
    harness.agents = Agents([Agent("cashier", "You pay.", [pay], max_steps=2)])
    turns = []
    for amount in (5, 7):
        harness.script(calls(("pay", {"amount": amount})), says(f"Paid {amount}."))
        turns.append(harness.ask(f"pay {amount}", agent="cashier"))
    url = harness.database.engine.url.render_as_string(hide_password=False)
    export = [sys.executable, "-m", "perdure.cli", "sessions", "export", turns[0]["session_id"]]
    (tmp_path / "cashiers.py").write_text(AGENTS.format(more=""), encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PERDURE_DATABASE_URL": url}
    environment["PERDURE_AGENTS"] = "cashiers"
    done = subprocess.run(export, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    (bundle := tmp_path / "session.json").write_text(done.stdout, encoding="utf-8")
    replayed = _replay(bundle)
    assert (replayed.returncode, replayed.stdout.splitlines()) == (
        0, [line for turn in turns for line in (f"turn {turn['turn_id']}:", "no difference")],
    ), replayed.stderr  # fmt: skip
    departed = _replay(bundle, " Quickly.", "--json")
    assert departed.returncode == 1
    assert [each["departs"] for each in json.loads(departed.stdout)] == [True, True]


@pytest.mark.exhaustive
def test_a_turn_is_recorded_from_its_installation(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its id, or as `perdure.send` returned it. A turn that is not settled is refused in a sentence."""
    url = harness.database.engine.url.render_as_string(hide_password=False)
    monkeypatch.setenv("PERDURE_DATABASE_URL", url)
    cashier = Agent("cashier", "You pay.", [pay])
    harness.agents = Agents([cashier])
    harness.script(calls(("pay", {"amount": 5})), says("Paid."))
    sent = harness.send("pay 5", agent="cashier")
    with pytest.raises(SettingsError, match="only a settled turn can be exported"):
        recorded(sent.turn_id)
    harness.run(sent.session_id)
    for source in (sent, sent.turn_id):
        assert recorded(source).reply == "Paid."
    assert not recorded(sent).replay(cashier).difference.calls
