"""The slots for deliveries are divided among the services, so that one that hangs leaves slots for the others."""

from __future__ import annotations

from contextlib import ExitStack

from hypothesis import given
from hypothesis import strategies as st

from perdure.tasks.shares import DeliveryShares


def test_one_competitor_takes_at_most_half() -> None:
    """A service that hangs occupies half of the slots, and the next one finds a free slot."""
    total = 20
    shares = DeliveryShares(total)
    with ExitStack() as held:
        taken = [held.enter_context(shares.slot("hangs")) for _ in range(total)]
        assert sum(taken) == total // 2
        assert held.enter_context(shares.slot("other"))
    with shares.slot("hangs") as again:
        assert again, "the slots are free again"


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_a_newcomer_finds_a_slot(wanted: list[str]) -> None:
    """Fewer competitors than there are doublings of the slots never take all, in whatever order they come."""
    total = 2**9
    shares = DeliveryShares(total)
    with ExitStack() as held:
        taken = [held.enter_context(shares.slot(each)) for each in wanted for _ in range(20)]
        assert sum(taken) < total
        assert held.enter_context(shares.slot("newcomer"))
