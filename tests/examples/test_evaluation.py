"""The example evaluation: its twenty recordings are turns of its agent, and it finds what a change does to them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from perdure.agents import Agents
from perdure.testing import Scripted, call, recorded
from perdure.turns.recording import record_session
from tests.turns.conftest import harness
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says

__all__ = ["harness"]

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluation"
RECORDINGS = EXAMPLE / "recordings.jsonl"

# What the customers wrote, the orders that the model looked up, and where it sent the message.
SAID: tuple[tuple[str, tuple[int, ...], str, bool, str], ...] = (
    ("Where is order 4711?", (4711,), "orders", False, "It was shipped on Monday and arrives on Thursday."),
    ("My order 4712 never came, although you say it did.", (4712,), "orders", False, "We ask the carrier where it is."),
    ("Compare 4711 and 4714, please.", (4711, 4714), "orders", False, "4711 is on its way, 4714 is in the warehouse."),
    ("Can I still change 4714 to two lamps?", (4714,), "orders", False, "It is still here, so we can change it."),
    ("What about order 9999?", (9999,), "orders", False, "We have no order of this number. Please check it."),
    ("I was charged twice for 4712!", (4712,), "billing", True, "We look into the second charge at once."),
    ("Where do I pay for 4713?", (4713,), "billing", False, "Use the link in the message about your order."),
    ("Please send the invoice for 4711 again.", (4711,), "billing", False, "It is on its way to you."),
    ("Someone has ordered with my card.", (), "billing", True, "We block the card now, and a colleague calls you."),
    ("Do you take cash?", (), "billing", False, "We take cards and transfers."),
    ("The lamp of 4712 is broken.", (4712,), "returns", False, "You get a label to send it back."),
    ("The lamp of 4712 gave me a shock!", (4712,), "returns", True, "Unplug it. A colleague calls you at once."),
    ("How long may I return things?", (), "returns", False, "For 30 days."),
    ("I do not like the color. 4712.", (4712,), "returns", False, "You may send it back within 30 days."),
    ("You sent me someone else's parcel.", (), "returns", False, "We collect it, and send yours."),
    ("When are you open?", (), "other", False, "From nine to six, Monday to Friday."),
    ("Do you have jobs?", (), "other", False, "The open places are on our website."),
    ("Your website shows an error.", (), "other", False, "Thank you, we look into it."),
    ("I am a journalist and have a question.", (), "other", False, "Our press office writes to you."),
    ("Thanks, the desk is beautiful!", (), "other", False, "How kind of you to write!"),
)

# What some of them wrote after that.
GOES_ON: dict[int, tuple[tuple[str, tuple[int, ...], str, bool, str], ...]] = {
    0: (("And 4714?", (4714,), "orders", False, "That one is in the warehouse."),),
    5: (
        ("It was 4714, sorry.", (4714,), "billing", True, "We look into that order instead."),
        ("Any news of it?", (4714,), "billing", False, "Not yet. We write to you."),
    ),
    10: (("And it burns!", (), "returns", True, "Unplug it. A colleague calls you at once."),),
    18: (("When do they write?", (), "other", False, "Within a day."),),
}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the example's agent, imported anew, as `evaluate.py` imports it."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("triage", "evaluate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("triage")


def _evaluate(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    del example
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *arguments])
    status: int = importlib.import_module("evaluate").main()
    return status


def _record(harness: Harness, agent: Any) -> list[dict[str, Any]]:
    """Let the engine run the twenty conversations on PostgreSQL, and export each."""
    harness.agents = Agents([agent])
    made = []
    for number, first in enumerate(SAID):
        for text, orders, team, urgent, answer in (first, *GOES_ON.get(number, ())):
            ticket = json.dumps({"team": team, "urgent": urgent, "answer": answer})
            looks = [calls(*(("order", {"number": each}) for each in orders))] if orders else []
            harness.script(*looks, says(ticket))
            turn = harness.ask(text, user_id=f"customer {number}")
        made.append(record_session(harness.runtime, UUID(turn["session_id"]), 100))
    return made


def _comparable(bundles: list[dict[str, Any]]) -> Any:
    """The bundles without ids and times, which differ from run to run."""
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", json.dumps(bundles))
    return json.loads(re.sub(r"\d{4}-\d\d-\d\d(T[0-9:.]+(\+00:00)?)?", "TIME", text))


@pytest.mark.long
def test_the_recordings_are_turns_of_the_agent(harness: Harness, example: ModuleType, tmp_path: Path) -> None:
    """As the engine runs and exports them now. The test writes them for the case that they have to be renewed."""
    made = _record(harness, example.triage)
    renewed = tmp_path / "recordings.jsonl"
    renewed.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in made), encoding="utf-8")
    kept = [json.loads(line) for line in RECORDINGS.read_text(encoding="utf-8").splitlines()]
    assert _comparable(kept) == _comparable(made), f"copy {renewed} to {RECORDINGS}"


def test_an_unchanged_agent_sorts_all_as_before(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _evaluate(example, monkeypatch) == 0
    said = capsys.readouterr().out
    assert "25 of 25 messages in 20 conversations are sorted as before.\n25 lead to the same calls, " in said
    assert "The prompt is the recorded one." in said


def test_a_changed_agent_is_found(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other instructions are named, and a worse share fails the run."""
    monkeypatch.setattr(example, "triage", replace(example.triage, instructions="Guess."))
    assert _evaluate(example, monkeypatch) == 0
    assert "+ Guess." in capsys.readouterr().out
    first = RECORDINGS.read_text(encoding="utf-8").splitlines()[0]
    guess = example.Ticket(team="other", urgent=False, answer="Perhaps.")
    replay = (
        recorded(json.loads(first)).turns[0].replay(example.triage, model=Scripted(call("order", number=4713), guess))
    )
    assert replay.difference.calls == ('- order({"number": 4711})', '+ order({"number": 4713})')
    assert replay.difference.data is not None
