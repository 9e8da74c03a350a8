"""The harness of the turn tests, and fixtures that end the harness's sessions."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from perdure.database.fencing import Fence
from perdure.sessions.ending import Ender, EndOutcome
from perdure.turns.lease.keeper import Keeper
from tests.turns.conftest import harness
from tests.turns.harness import Harness

__all__ = ["harness"]

End = Callable[[UUID], EndOutcome]


@pytest.fixture
def cleaned() -> list[UUID]:
    """The ids of the sessions whose data outside PostgreSQL was removed."""
    return []


@pytest.fixture
def keeper(harness: Harness) -> Keeper:
    """A keeper that renews leases when the test calls `beat`."""
    return Keeper(harness.database, harness.clock, harness.settings.turn)


@pytest.fixture
def end(harness: Harness, keeper: Keeper, cleaned: list[UUID]) -> End:
    """A function that ends sessions as a worker does, with the harness's model."""
    return ender(harness, keeper, cleaned.append).end


def ender(harness: Harness, keeper: Keeper, clean: Callable[[UUID], object]) -> Ender:
    """An `Ender` like a worker's: `keeper` renews its leases, and `clean` removes data outside PostgreSQL."""

    def cleaned_up(session_id: UUID, _: Fence) -> None:
        clean(session_id)

    return Ender(harness.database, harness.clock, harness.model, 5, 30, keeper.keep_fenced, cleaned_up)
