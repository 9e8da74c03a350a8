"""What turns cost counts once, over a SIGKILL of a real worker at each commit that reserves or settles it."""

from __future__ import annotations

from decimal import Decimal

import pytest

from perdure.database.engine import Moment
from tests.processes.faults import Place, done
from tests.processes.installation import ADAPTED, MODULES, NATIVE, Installation
from tests.processes.model_server import answer_to

PATIENCE_S = 60.0
MODEL = "openai-chat:gpt-5-mini"
"""A model with known prices, through pydantic-ai: one on perdure's own wire would have those of its server."""
PRICE = Decimal(11 * 25 + 7 * 200) / 10**8
"""US dollars of a call of this model, of which the model's server reports 11 and 7 tokens."""
MOMENTS: tuple[Moment, ...] = ("before", "after")

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]


@pytest.mark.exhaustive
@pytest.mark.parametrize("agent", [NATIVE, ADAPTED])
@pytest.mark.parametrize(
    "place", [Place(moment, "budgets.spend", nth) for nth in (1, 2, 3) for moment in MOMENTS], ids=str
)
def test_after_a_kill_a_turn_costs_what_its_calls_cost(installation: Installation, place: Place, agent: str) -> None:
    """Nothing stays reserved, and the sums of the day have the turn once."""
    limits = dict.fromkeys(("PERDURE_BUDGET__TURN", "PERDURE_BUDGET__USER_DAY", "PERDURE_BUDGET__TENANT_DAY"), "1")
    text = f"pure: {place}"
    with installation.killed_once(place, PERDURE_MODEL=MODEL, PERDURE_AGENTS=MODULES[ADAPTED], **limits):
        turn_id = installation.accept(text, agent=agent).turn_id
        [turn] = installation.settled(turn_id, within_s=PATIENCE_S)
    assert (turn["status"], turn["reply"]["text"]) == ("done", answer_to(text, done("pure", text)))
    [spent] = installation.query("SELECT total, today FROM turn_spendings")
    assert tuple(spent) == (2 * PRICE, 2 * PRICE)
    sums = installation.query("SELECT kind, amount FROM day_spendings ORDER BY kind")
    assert [tuple(row) for row in sums] == [("tenant", 2 * PRICE), ("user", 2 * PRICE)]
    installation.check()
