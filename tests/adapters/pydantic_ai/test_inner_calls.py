"""The effect ids of calls by agents that a tool runs: each has its own, also when the outer call is repeated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import RunContext
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from perdure import effect, effect_id
from perdure.turns.lease.claim import Ran
from tests.adapters.pydantic_ai.test_agents import Scripting, _call, _use
from tests.turns.harness import Harness

Reply = list[ToolCallPart]


class Shop:
    """A service that takes each order once, and the agents that order there."""

    def __init__(self) -> None:
        self.requests: list[tuple[UUID, str]] = []

    @property
    def orders(self) -> list[str]:
        """What was ordered: a request with a known key is the same order."""
        return sorted(item for _, item in dict(self.requests).items())

    def order(self, item: str, size: int = 1) -> str:
        """Order an item."""
        self.requests.append((effect_id(), f"{item} {size}"))
        assert effect_id() == self.requests[-1][0]
        return "ordered"

    def buyer(self, *replies: Reply, name: str = "buyer", **given: Any) -> PydanticAgent[Any, Any]:
        """An agent that makes the calls of `replies` in each run."""

        def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            del info
            asked = sum(isinstance(each, ModelResponse) for each in messages)
            return ModelResponse(parts=replies[asked] if asked < len(replies) else [TextPart("bought")])

        made = PydanticAgent[Any, Any](FunctionModel(answer), name=name, **given)
        made.tool_plain(self.order)
        return made


Work = Callable[[Shop], Awaitable[None]]


def _tea(call_id: str = "c1", size: int = 1) -> ToolCallPart:
    return _call("order", call_id, item="tea", size=size)


async def _one_after_another(shop: Shop) -> None:
    await shop.buyer([_tea()], [_tea(size=2)], [_tea()]).run("Buy!")


async def _side_by_side(shop: Shop) -> None:
    await shop.buyer([_tea("c1"), _tea("c2", 2), _tea("c3")]).run("Buy!")


async def _two_runs(shop: Shop) -> None:
    for _ in range(2):
        await shop.buyer([_tea()]).run("Buy!")
    await shop.buyer([_tea(size=2)]).run("Buy!")


async def _two_runs_at_once(shop: Shop) -> None:
    buyers = [shop.buyer([_tea()]), shop.buyer([_tea()], name="another"), shop.buyer([_tea(size=2)])]
    await asyncio.gather(*(each.run("Buy!") for each in buyers))


async def _nested(shop: Shop) -> None:
    async def delegate() -> str:
        """Let another agent buy."""
        return str((await shop.buyer([_tea()]).run("Buy!")).output)

    manager = shop.buyer([_call("delegate", "d1"), _tea("c1", 2)], [_call("delegate", "d2")])
    manager.tool_plain(delegate)
    await manager.run("Buy!")


async def _other_json(shop: Shop) -> None:
    first = not shop.requests
    texts = ['{"item": "tea", "size": 1}', '{"size":1,"item":"tea"}']
    replies = [[ToolCallPart("order", text)] for text in (texts if first else reversed(texts))]
    await shop.buyer(*replies, [_tea(size=2)]).run("Buy!")


async def _as_output(shop: Shop) -> None:
    ordering = shop.buyer([_call("final_result", item="tea", size=1)], output_type=shop.order)
    await ordering.run("Buy!")
    await ordering.run("Buy!")
    await shop.buyer([_tea(size=2)]).run("Buy!")


async def _in_a_thread(shop: Shop) -> None:
    await asyncio.to_thread(lambda: shop.buyer([_tea()], [_tea()], [_tea(size=2)]).run_sync("Buy!"))


WORKS: list[Work] = [
    _one_after_another, _side_by_side, _two_runs, _two_runs_at_once, _nested, _other_json, _as_output, _in_a_thread,
]  # fmt: skip


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.__name__.strip("_"))
def test_each_inner_call_has_its_own_id_in_each_repetition(harness: Harness, work: Work) -> None:
    """The worker dies before the outer call's result is committed; the service has each of three orders once."""
    shop, outer = Shop(), list[UUID]()
    bare = PydanticAgent(name="assistant")

    @bare.tool_plain(metadata=effect("idempotent"))
    async def delegate() -> str:
        """Let another agent buy."""
        outer.append(effect_id())
        await work(shop)
        assert effect_id() == outer[-1]
        return "done"

    _use(harness, bare, Scripting([_call("delegate")], "bought").model)
    sent = harness.send()
    with harness.crashing("before", "turns.step", 2):
        harness.run(sent.session_id)
    once = dict(shop.requests)
    assert shop.orders == ["tea 1", "tea 1", "tea 2"]
    harness.move(31)
    assert harness.run(sent.session_id) == Ran(1)
    assert harness.turn(sent.turn_id)["reply"]["text"] == "bought"
    assert len(shop.requests) == 6
    assert dict(shop.requests) == once
    assert len(set(outer)) == 1
    assert outer[0] not in once


def test_ids_of_different_outer_calls_differ(harness: Harness) -> None:
    """Two calls of one reply order the same: two orders."""
    shop, bare = Shop(), PydanticAgent[Any, Any](name="assistant")

    @bare.tool(metadata=effect("idempotent"))
    async def delegate(ctx: RunContext[Any]) -> str:
        """Let another agent buy."""
        return str((await shop.buyer([_tea()]).run("Buy!", usage=ctx.usage)).output)

    _use(harness, bare, Scripting([_call("delegate", "d1"), _call("delegate", "d2")], "bought").model)
    assert harness.ask()["reply"]["text"] == "bought"
    assert shop.orders == ["tea 1", "tea 1"]


def test_outside_a_turn_nothing_changes() -> None:
    """A tool of an agent that pydantic-ai runs alone has no effect id."""
    with pytest.raises(LookupError, match="outside a tool"):
        Shop().buyer([_tea()]).run_sync("Buy!")
