"""The stage of the turns' tests, and hands that end sessions on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from uuid import UUID

import pytest

from perdure.database.fencing import Fence
from perdure.sessions.ending import Ender, EndOutcome, Hold
from perdure.turns.lease.claim import Claimed
from perdure.turns.lease.keeper import Keeper
from tests.turns.conftest import stage
from tests.turns.stage import Stage

__all__ = ["stage"]

End = Callable[[UUID], EndOutcome]


@pytest.fixture
def cleaned() -> list[UUID]:
    """The sessions that were cleaned up after."""
    return []


@pytest.fixture
def keeper(stage: Stage) -> Keeper:
    """Renews the leases when `beat` is called."""
    return Keeper(stage.database, stage.clock, stage.settings.turn)


@pytest.fixture
def end(stage: Stage, keeper: Keeper, cleaned: list[UUID]) -> End:
    """Ends sessions as a worker does, with the stage's model."""
    return ender(stage, keeper, cleaned.append).end


def ender(stage: Stage, keeper: Keeper, clean: Callable[[UUID], object]) -> Ender:
    """Ends sessions as a worker does that keeps its leases with `keeper`."""

    def holding(session_id: UUID, fence: Fence) -> AbstractContextManager[Hold]:
        return keeper.holding(Claimed(session_id, fence, 0, 0.0, None))

    def cleaned_up(session_id: UUID, _: Fence) -> None:
        clean(session_id)

    return Ender(stage.database, stage.clock, stage.model, 5, 30, holding, cleaned_up)
