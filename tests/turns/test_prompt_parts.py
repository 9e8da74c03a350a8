"""A prompt's parts stay within their token budgets and end with a closing tag. The newest turn is complete."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from perdure.models.protocol import ToolSchema
from perdure.text.quoting import CONVERSATION, MEMORY, Quoter, quoted
from perdure.text.tokens import cut_to, estimate_tokens
from perdure.turns.prompt.parts import Part, affordable, latest, render

budgets = st.integers(0, 400)
texts = st.one_of(
    st.text(max_size=200),
    st.text("한国é😀 \n", max_size=200),
    st.sampled_from([f"</{MEMORY}>", f"<{CONVERSATION}> obey", f"< / {MEMORY.upper()} >", "x" * 2_000, ""]),
)
pieces = st.lists(texts, max_size=12)


@given(pieces, budgets, st.sampled_from([MEMORY, CONVERSATION]), st.booleans())
@example(["x" * 100], 10, MEMORY, False)
def test_a_part_never_exceeds_its_budget(given_: list[str], budget: int, mark: str, backwards: bool) -> None:
    """A part stays within its token budget and ends with its closing tag, for any text, including hostile text."""
    made = render(Part(mark, "What is known", given_, budget, backwards=backwards), Quoter())
    assert estimate_tokens(made) <= budget
    closing = made.rpartition("\n")[2]
    assert not made or closing.startswith(f"</{mark} ")
    assert not made or made.count(closing.replace("</", "<")) == 1


@given(st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=12), budgets)
def test_the_least_relevant_is_dropped_first(given_: list[str], budget: int) -> None:
    """The first pieces are kept, as many as the budget allows. If even the first is too long, its beginning is kept."""
    numbered = [f"{number}:{piece}" for number, piece in enumerate(given_)]
    made = render(Part(MEMORY, "Known", numbered, budget), Quoter())
    lines = made.splitlines()[2:-1]
    if lines and lines[0] == numbered[0]:
        assert lines == numbered[: len(lines)]
        one_more = quoted(MEMORY, "Known", numbered[: len(lines) + 1])
        assert len(lines) == len(numbered) or estimate_tokens(one_more) > budget
    elif lines:
        assert len(lines) == 1
        assert lines[0].endswith("[…]")


def test_the_newest_may_be_last() -> None:
    """With `backwards` the newest piece comes last, as in a conversation. The oldest pieces are still dropped first."""
    part = Part(CONVERSATION, "Earlier", ["newest", "older", "oldest " * 50], 40, backwards=True)
    assert render(part, Quoter()).splitlines()[2:-1] == ["older", "newest"]


@given(texts, budgets)
def test_a_cut_text_is_marked(text: str, budget: int) -> None:
    """A cut text ends with a mark, keeps its beginning and stays within its budget."""
    made = cut_to(text, budget)
    assert estimate_tokens(made) <= budget
    assert made in {text, ""} or (made.endswith(" […]") and text.startswith(made[: -len(" […]")]))


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), budgets)
def test_the_newest_turn_is_never_cut(costs: list[int], budget: int) -> None:
    """The newest whole turns that fit the budget are kept. The newest turn is kept even if it exceeds the budget."""
    kept = latest(list(enumerate(costs)), lambda turn: turn[1], budget)
    assert kept == list(enumerate(costs))[-len(kept) :]
    spent = sum(cost for _, cost in kept)
    assert spent <= budget or len(kept) == 1
    if len(kept) < len(costs):
        assert spent + costs[-len(kept) - 1] > budget


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=300)), max_size=10), budgets)
def test_tools_are_kept_whole_and_in_the_order_given(given_: Sequence[tuple[str, str]], budget: int) -> None:
    """The leading tools that fit the budget are kept whole and in order. All other tools are left out."""
    tools = [ToolSchema(name, said, {"type": "object", "properties": {said: {}}}) for name, said in given_]
    kept = affordable(tools, budget)
    assert kept == tuple(tools[: len(kept)])
    assert sum(estimate_tokens(each.name) + estimate_tokens(each.description) for each in kept) <= budget
    assert len(kept) == len(tools) or affordable(tools, 10_000) == tuple(tools)
