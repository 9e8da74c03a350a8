"""The example agent of pydantic-ai, in a unit test as its users would write it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from perdure.testing import Scripted, ask, call

BANK = Path(__file__).parents[2] / "examples" / "pydantic_ai" / "bank.py"


@pytest.fixture
def bank() -> ModuleType:
    """The example's module, imported anew."""
    spec = importlib.util.spec_from_file_location("bank", BANK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_card_is_blocked_once_a_person_approves(bank: ModuleType) -> None:
    """The calls run with the customer of the turn, and the output is the reply's data."""
    model = Scripted(call("balance"), call("block_card"), call("final_result", advice="Your card is blocked.", risk=9))
    waiting = ask(bank.agent, "My card was stolen", model=model, user_id="ana")
    assert (waiting.status, bank.BLOCKED) == ("waiting_approval", {})
    model = Scripted(call("balance"), call("block_card"), call("final_result", advice="Your card is blocked.", risk=9))
    answer = ask(bank.agent, "My card was stolen", model=model, user_id="ana", approve=True)
    assert answer.data == {"advice": "Your card is blocked.", "risk": 9}
    assert [each.result for each in answer.calls] == ["123.45", "The card is blocked."]
    assert {"ana": str(answer.calls[1].effect_id)} == bank.BLOCKED
