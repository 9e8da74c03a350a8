"""Declaring a function as a tool, and validating a model's arguments for it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from enum import Enum
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypeAliasType, TypedDict

from perdure.errors import SettingsError, ToolError
from perdure.tools.awaited.external import external_tool
from perdure.tools.awaited.task import celery_tool
from perdure.tools.registry import DidNotHappen, Effect, ProbeOutcome, Tool, ToolContext, tool

CONTEXT = ToolContext("ana", UUID(int=1), UUID(int=2), UUID(int=3), "cli", threading.Event())


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Address(BaseModel):
    street: str
    number: int


@dataclass
class Guest:
    name: str
    age: int = 30


@tool
def everything(  # noqa: D417 (parameters that are not described are part of the test)
    city: str,
    copy: int,
    context: ToolContext,
    _hidden: float = 0.5,
    *,
    sizes: list[Size] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    address: Address | None = None,
    guest: Guest | None = None,
    day: date | None = None,
    limit: Annotated[int, Field(ge=1, le=10)] = 5,
    model_dump: Any = None,
) -> list[str]:
    """Use a parameter of every kind.

    A second paragraph.

    Args:
        city: The city's name,
            as written there.
        copy (int): How many.
        limit: At most so many: ten.

    Returns:
        What it got.

    Raises:
        ValueError: never.
    """
    received = locals()
    return [f"{name}={value!r}" for name, value in received.items() if value is not None and name != "context"]


def test_the_docstring_describes_the_tool_and_its_parameters() -> None:
    """A tool's descriptions come from its docstring. Sections such as `Returns` are left out to save tokens."""
    assert everything.name == "everything"
    assert everything.description == "Use a parameter of every kind.\n\nA second paragraph."
    properties = everything.parameters["properties"]
    assert properties["city"] == {"type": "string", "description": "The city's name, as written there."}
    assert properties["copy"] == {"type": "integer", "description": "How many."}
    assert properties["limit"]["description"] == "At most so many: ten."


def test_the_schema_holds_what_a_model_may_give() -> None:
    """The schema omits the context, which the engine passes. Parameters may have names that pydantic itself uses."""
    schema = everything.schema()
    assert schema.parameters["type"] == "object"
    assert schema.parameters["required"] == ["city", "copy"]
    assert schema.parameters["additionalProperties"] is False
    assert "context" not in schema.parameters["properties"]
    assert {"_hidden", "copy", "model_dump"} <= set(schema.parameters["properties"])
    assert schema.parameters["properties"]["limit"]["maximum"] == 10
    assert "title" not in schema.parameters["properties"]["city"]


def test_a_tool_is_unsafe_by_default() -> None:
    """A tool is unsafe by default, because an effect of unknown class must not be repeated."""
    assert everything.effect is Effect.UNSAFE
    assert everything.timeout_s is None
    assert everything.probe is None


def test_a_tool_keeps_its_declaration() -> None:
    """A tool has the values of its declaration as attributes, and can be called like the function that it wraps."""

    def did_not(context: ToolContext) -> ProbeOutcome:
        return DidNotHappen()

    @tool(effect="idempotent", name="pay-now", timeout_s=2.5, probe=did_not, max_result_chars=100)
    def pay(amount: int) -> str:
        """Pay."""
        return f"paid {amount}"

    assert (pay.name, pay.effect, pay.timeout_s, pay.max_result_chars) == ("pay-now", Effect.IDEMPOTENT, 2.5, 100)
    assert pay.probe is not None
    assert pay.probe(CONTEXT) == DidNotHappen()
    assert pay(3) == "paid 3", "the tool can be called like the function that it wraps"


def test_arguments_become_what_the_signature_says() -> None:
    """Arguments are converted from JSON to the signature's types, and defaults are added."""
    parsed = everything.parse(
        '{"city": "서울", "copy": "12", "_hidden": 1, "sizes": ["large"], "mode": "slow", "day": "2026-02-28",'
        ' "address": {"street": "x", "number": 3}, "guest": {"name": "Ana"}, "model_dump": [1]}'
    )
    assert parsed == {
        "city": "서울",
        "copy": 12,
        "_hidden": 1.0,
        "sizes": [Size.LARGE],
        "mode": "slow",
        "address": Address(street="x", number=3),
        "guest": Guest("Ana"),
        "day": date(2026, 2, 28),
        "limit": 5,
        "model_dump": [1],
    }


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("nonsense", "not valid JSON"),
        ("[1]", "expected a JSON object, got an array"),
        ("null", "expected a JSON object, got null"),
        ('{"city": "a", "copy": 1} x', "not valid JSON"),
        ("{}", "city is missing; copy is missing"),
        ('{"city": "a", "copy": 1, "colour": "red"}', "colour is not a parameter"),
        ('{"city": "a", "copy": 1, "city": "b"}', "the key 'city' is given twice"),
        ('{"city": "a", "copy": 1.5}', "copy: input should be a valid integer"),
        ('{"city": "a", "copy": true, "limit": 11}', "limit: input should be less than or equal to 10"),
        ('{"city": "a", "copy": NaN}', "NaN is not a JSON number"),
        ('{"city": "a", "copy": 1, "_hidden": -Infinity}', "-Infinity is not a JSON number"),
        ('{"city": "a", "copy": 1, "_hidden": 1e999}', "the number 1e999 is too large"),
        ('{"city": "a", "copy": 1, "_hidden": "nan"}', "_hidden: input should be a finite number"),
        ('{"city": "a", "copy": 1, "_hidden": 1' + "0" * 400 + "}", "_hidden: input should be a finite number"),
        ('{"city": "a", "copy": 1' + "0" * 5_000 + "}", "has more than 4,300 digits"),
        ('{"city": "a\\u0000", "copy": 1}', "NUL"),
        ('{"city": "a\\ud83d", "copy": 1}', "a lone surrogate"),
        ('{"city": "a\ud83d", "copy": 1}', "a lone surrogate"),
        ('{"city\\u0000": "a"}', "NUL"),
        ('{"city": "a", "copy": 1, "model_dump": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 levels"),
        ('{"city": "a", "copy": 1, "model_dump": ' + "[" * 100_000, "nested more than 64 levels"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_reason(arguments: str, reason: str) -> None:
    """The error for invalid arguments says what is wrong and what is expected, so that the model can correct them."""
    with pytest.raises(ToolError) as caught:
        everything.parse(arguments)
    assert reason in caught.value.message
    assert "Expected a JSON object that fits this schema" in caught.value.message
    caught.value.message.encode()


@tool
def nothing() -> None:
    """Take nothing."""


@pytest.mark.parametrize("arguments", ["", "  \n", "{}"])
def test_no_arguments_at_all_are_an_empty_object(arguments: str) -> None:
    """Empty arguments of a tool without parameters count as `{}`, because several providers send an empty string."""
    assert nothing.parse(arguments) == {}
    assert nothing.call({}, CONTEXT) == "null"


@tool
def greet(name: str = "you") -> str:
    """Greet."""
    return f"Hello {name}."


@pytest.mark.parametrize("arguments", ["", "  \n"])
def test_empty_arguments_are_not_the_defaults(arguments: str) -> None:
    """An empty text may be what is left of lost arguments, so no tool runs with its defaults because of it."""
    with pytest.raises(ToolError, match="they are empty"):
        greet.parse(arguments)
    assert greet.parse("{}") == {"name": "you"}
    for parameters in (None, {"type": "object", "properties": {"name": {}}}):
        with pytest.raises(ToolError, match="they are empty"):
            celery_tool("greetings.send", parameters=parameters).parse(arguments)
    assert celery_tool("greetings.send", parameters={"type": "object"}).parse(arguments) == {}


def test_huge_integers_survive() -> None:
    """Large integers are not rounded, because ids of other systems may exceed a float's precision."""
    huge = 10**4_000 + 7
    assert everything.parse(f'{{"city": "a", "copy": {huge}}}')["copy"] == huge


def test_the_context_is_injected() -> None:
    """The engine passes the context with the user and the idempotency key. A model cannot pass a context."""

    @tool
    def whoami(loud: bool, who: ToolContext) -> str:
        """Return the user on whose behalf the tool runs."""
        return f"{who.user_id} {who.effect_id} {loud}"

    assert whoami.call(whoami.parse('{"loud": true}'), CONTEXT) == f"ana {UUID(int=3)} True"
    with pytest.raises(ToolError, match="who is not a parameter"):
        whoami.parse('{"loud": true, "who": {"user_id": "root"}}')


Context = TypeAliasType("Context", ToolContext[int])


def test_the_context_may_be_optional_annotated_or_an_alias() -> None:
    """A function that is also called without a context has `context: ToolContext | None = None`."""

    def optional(context: ToolContext[int] | None = None) -> str:
        """Say who."""
        return context.user_id if context else "nobody"

    def annotated(context: Annotated[ToolContext, "the call's"]) -> str:
        """Say who."""
        return context.user_id

    def alias(context: Context) -> str:
        """Say who."""
        return context.user_id

    for function in (optional, annotated, alias):
        made: Tool = tool(function)
        assert made.parameters["properties"] == {}
        assert made.call(made.parse("{}"), CONTEXT) == "ana"
    assert tool(optional)() == "nobody"


class Booking(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date
    size: Size
    seats: tuple[int, ...]
    key: UUID


def test_a_strict_type_accepts_its_json() -> None:
    """JSON has no dates, tuples and UUIDs. A strict type accepts the texts and arrays that its schema asks for."""

    @tool
    def book(booking: Booking) -> str:
        """Book seats."""
        return repr(booking)

    given = '{"day": "2026-02-28", "size": "large", "seats": [1, 2], "key": "00000000-0000-0000-0000-000000000003"}'
    assert book.parse(f'{{"booking": {given}}}') == {
        "booking": Booking(day=date(2026, 2, 28), size=Size.LARGE, seats=(1, 2), key=UUID(int=3))
    }
    with pytest.raises(ToolError, match=r"booking.day: input should be a valid date"):
        book.parse(f'{{"booking": {given.replace(chr(34) + "2026-02-28" + chr(34), "7")}}}')


def test_an_iterable_can_be_read_by_hooks_and_the_tool() -> None:
    """An author annotates a parameter that takes any collection as `Iterable`. pydantic's iterator is read once."""

    @tool(requires_approval=lambda arguments: sum(arguments["numbers"]) > 9)
    def total(numbers: Iterable[int], more: Iterable[int] = count()) -> str:
        """Add numbers."""
        return f"{sum(numbers)} {next(iter(more))}"

    parsed = total.parse('{"numbers": [1, "2"]}')
    assert not total.needs_approval(parsed)
    assert total.call(parsed, CONTEXT) == "3 0"
    with pytest.raises(ToolError, match="should be a valid integer"):
        total.parse('{"numbers": ["x"]}')


def test_a_literal_of_a_plain_enum_is_refused() -> None:
    """No JSON is read as such a member: every call would fail."""

    def resize(size: Literal[Size.LARGE]) -> str:
        """Resize."""
        return size.name

    with pytest.raises(SettingsError, match=r"the parameter size .*reads Size\.LARGE .* make Size a StrEnum"):
        tool(resize)


def test_infinities_are_not_in_the_schema() -> None:
    """They are not JSON: a provider would refuse each request with the tool."""

    @tool
    def find(
        most: float = float("inf"), least: Annotated[float, Field(ge=float("-inf"), examples=[1, float("nan")])] = 0
    ) -> str:
        """Find articles."""
        return f"{least} to {most}"

    json.dumps(find.parameters, allow_nan=False)
    assert find.parameters["properties"] == {"most": {"type": "number"}, "least": {"default": 0, "type": "number"}}
    assert find.call(find.parse("{}"), CONTEXT) == "0 to inf"


def test_defaults_are_not_shared_between_calls() -> None:
    """A call that changes a default list does not affect the next call."""

    @tool
    def collect(into: list[int] = []) -> list[int]:  # noqa: B006 (the very mistake)
        """Collect."""
        into.append(1)
        return into

    assert [collect.call(collect.parse("{}"), CONTEXT) for _ in range(2)] == ["[1]", "[1]"]


async def asynchronous_generating() -> Any:
    """An asynchronous generator."""
    yield 1


def generating() -> Any:
    """A generator."""
    yield 1


def variadic(*args: int) -> str:
    """A function with `*args`."""
    return ""


def keywords(**kwargs: int) -> str:
    """A function with `**kwargs`."""
    return ""


def positional(a: int, /) -> str:
    """A function with a positional-only parameter."""
    return ""


def bare(a) -> str:  # type: ignore[no-untyped-def]  # noqa: ANN001 (the very mistake)
    """A function with a parameter without an annotation."""
    return ""


def unresolved(a: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821 (the very mistake)
    """A function with an undefined annotation."""
    return ""


def unfit(a: threading.Lock) -> str:
    """A function with a parameter that pydantic cannot check."""
    return ""


def look_around(number: int, text: Annotated[str, Field(pattern="^(?!x)")]) -> str:
    """A function with a regular expression that pydantic does not support."""
    return f"{number} {text}"


def callback(a: Callable[[], None]) -> str:
    """A function with a parameter that has no JSON schema."""
    return ""


def two_contexts(a: ToolContext, b: ToolContext) -> str:
    """A function with two contexts."""
    return ""


def undocumented(a: int) -> str:
    return ""


class Shop:
    def order(self, item: str) -> str:
        """Order."""
        return f"ordered {item}"


def greeting(name: str) -> str:
    """Greet."""
    return f"Hello {name}."


def test_without_any_docstring_the_error_names_the_option() -> None:
    """`python -OO` removes those of perdure's own tools, too; `-O` does not."""
    for option, says in (("-O", ""), ("-OO", "with -OO and PYTHONOPTIMIZE=2: start it without, or with -O")):
        command = [sys.executable, option, "-c", "import perdure.tools.builtin"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (ended.returncode == 0, says in ended.stderr) == (not says, True), ended.stderr


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (asynchronous_generating, "is a generator"),
        (generating, "is a generator"),
        (variadic, r"takes \*args"),
        (keywords, r"takes \*\*kwargs"),
        (positional, "positional-only parameter a"),
        (bare, "parameter a without a type annotation"),
        (unresolved, "cannot be resolved"),
        (unfit, "parameter a that pydantic cannot check: .* schema for <.*lock'?>$"),
        (callback, "parameter a without a JSON schema"),
        (look_around, "parameter text that pydantic cannot check: error: look-around.* is not supported$"),
        (two_contexts, "two parameters of type ToolContext: a, b"),
        (undocumented, "has no docstring"),
        (Guest, "is not a function"),
        (len, "is not a function; write a function"),
        (Shop.order, r"is a method; make the tool of the bound method, such as tool\(shop.order\)"),
        (staticmethod(greeting), "write @staticmethod above @tool"),
        (classmethod(greeting), "make the tool of the bound method"),  # type: ignore[arg-type]
        (partial(greeting, name="Ana"), "an object of the class partial is not a function; write a function"),
        (tool(greeting), "it is a tool already"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_where_it_is_defined(
    function: Callable[..., Any], reason: str
) -> None:
    """`@tool` refuses an invalid function when it is defined. The error names the function."""
    with pytest.raises(SettingsError, match=reason) as caught:
        tool(function)
    assert getattr(function, "__name__", "") in str(caught.value)


@pytest.mark.parametrize(
    ("declaration", "reason"),
    [
        ({"name": "two words"}, "is named 'two words'"),
        ({"name": ""}, "is named ''"),
        ({"name": "x" * 65}, "1 to 64"),
        ({"name": "정보"}, "is named"),
        ({"name": "ok\n"}, "is named"),
        ({"effect": "harmless"}, "accepted: pure, idempotent, unsafe"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
        ({"max_result_chars": 0}, "max_result_chars=0"),
        ({"breaker": "the bank"}, "breaker='the bank'"),
    ],
)
def test_an_invalid_declaration_is_refused(declaration: dict[str, Any], reason: str) -> None:
    """An invalid declaration is refused, such as a name that providers do not accept."""

    def fine(a: int) -> str:
        """Do."""
        return ""

    with pytest.raises(SettingsError, match=reason):
        tool(**declaration)(fine)


def test_a_bound_method_is_a_function_too() -> None:
    """A bound method can be a tool, so that tools can share a client."""
    made: Tool = tool(Shop().order)
    assert made.call(made.parse('{"item": "tea"}'), CONTEXT) == "ordered tea"


def test_a_parameter_may_be_described_by_a_field() -> None:
    """The docstring's description comes first; a `Field` as the default has the default, and what else it says."""

    def order(  # noqa: D417 (the other parameters have a `Field`)
        size: Annotated[int, Field(description="In litres.", le=5)],
        milk: Annotated[str, Field(description="Which milk.")] = "oat",
        pieces: int = Field(3, le=9, description="How many."),
        names: list[str] = Field(default_factory=list),  # noqa: B008 (as pydantic documents it)
        note: str = Field(alias="remark"),
    ) -> str:
        """Order tea.

        Args:
            milk: What is poured in.
        """
        return f"{size} {milk} {pieces} {names} {note}"

    export = external_tool("order", parameters=order)
    for parameters in (tool(order).parameters, export.parameters):
        shown = {name: each.get("description") for name, each in parameters["properties"].items()}
        assert shown == {
            "size": "In litres.", "milk": "What is poured in.", "pieces": "How many.", "names": None, "note": None,
        }  # fmt: skip
        assert parameters["required"] == ["size", "note"]
        assert parameters["properties"]["pieces"]["maximum"] == 9
    made = tool(order)
    assert made.call(made.parse('{"size": 1, "note": "!"}'), CONTEXT) == "1 oat 3 [] !"
    for asked in (made, export):
        with pytest.raises(ToolError, match="pieces: input should be less than or equal to 9"):
            asked.parse('{"size": 1, "note": "!", "pieces": 10}')


def _raises(error: BaseException) -> Callable[[Any], Any]:
    def function(given: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize("error", [KeyError("x"), AttributeError("no split"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("declare", [tool, partial(external_tool, "act"), partial(celery_tool, "act")])
def test_a_validator_that_fails_refuses_the_arguments(
    error: BaseException, declare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The model reads the error, and the log has its traceback."""

    def act(value: Any) -> str:
        """Act."""
        return f"{value}"

    act.__annotations__["value"] = Annotated[int, BeforeValidator(_raises(error))]
    made = tool(act) if declare is tool else declare(parameters=act)
    with pytest.raises(ToolError, match=f"arguments of act were refused: {type(error).__name__}"):
        made.parse('{"value": 1}')
    assert "a validator of the arguments of tool act failed" in caplog.text


def test_a_validator_may_answer_the_model() -> None:
    """A `ToolError` of a validator is the answer of the call."""

    @tool
    def act(value: Annotated[int, BeforeValidator(_raises(ToolError("Ask for less.")))]) -> str:
        """Act."""
        return f"{value}"

    with pytest.raises(ToolError, match=r"^Ask for less\.$"):
        act.parse('{"value": 1}')


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), KeyboardInterrupt()])
def test_a_function_about_approval_that_fails_needs_staff(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing that it raises ends the thread of the turn."""

    @tool(requires_approval=_raises(error), approver=_raises(error))
    def act() -> str:
        """Act."""
        return "acted"

    assert act.needs_approval({})
    assert act.approver_of({}) == "staff"
    assert "the requires_approval of tool act failed" in caplog.text
    assert "the approver of tool act failed" in caplog.text


class Filter(BaseModel):
    top: int = Field(alias="$top")


class Sizes(TypedDict):
    größe: int  # noqa: PLC2401


def test_keys_that_providers_refuse_are_translated() -> None:
    """Models read and write other keys, at every depth. The function, and the author, have the function's own."""

    @tool
    def find(größe: int, by: Filter, sizes: list[Sizes] | None = None) -> str:  # noqa: PLC2401
        """Find articles."""
        return f"{größe} {by.top} {sizes}"

    shown = json.dumps(find.schema().parameters)
    assert not any(f'"{key}"' in shown for key in ("größe", "$top", "gr\\u00f6\\u00dfe"))
    assert set(find.parameters["properties"]) == {"größe", "by", "sizes"}
    written = {"gr__e": 3, "by": {"_top": 2}, "sizes": [{"gr__e": 1}]}
    assert find.call(find.parse(json.dumps(written)), CONTEXT) == "3 2 [{'größe': 1}]"
    own = {"größe": 3, "by": {"$top": 2}, "sizes": [{"größe": 1}]}
    assert find.load(json.dumps(written)) == own
    assert find.parse(json.dumps(own)) == find.parse(json.dumps(written))
    with pytest.raises(ToolError, match="gr__e"):
        find.parse("{}")
