"""Types of outputs: their schemas, and what counts as a value of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    RootModel,
    SecretStr,
    computed_field,
)
from typing_extensions import TypedDict

from perdure import Agent
from perdure.errors import GuardRejected, ModelRetry, SettingsError
from perdure.models.protocol import Message, ModelRequest, Role
from perdure.models.providers.chat_wire import request_body
from perdure.output import OutputType
from perdure.testing import Scripted, ask


class Item(BaseModel):
    title: str
    amount: int = Field(1, ge=1)


class Order(BaseModel):
    items: list[Item]
    note: str | None = None


class Tree(BaseModel):
    children: list[Tree] = []


@dataclass
class Point:
    x: int
    y: int


class Person(TypedDict):
    name: str


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def _of(given: Any) -> OutputType:
    return OutputType(given, "agent 'shop'")


@pytest.mark.parametrize(
    ("given", "text", "data"),
    [
        (Order, '{"items": [], "note": "soon"}', {"items": [], "note": "soon"}),
        (Order, '{"items": [{"title": "tea"}]}', {"items": [{"title": "tea", "amount": 1}], "note": None}),
        (Tree, '{"children": [{"children": []}]}', {"children": [{"children": []}]}),
        (Point, 'Here it is:\n```json\n{"x": 1, "y": 2}\n```', {"x": 1, "y": 2}),
        (Person, '{"name": "Ana"} is who you mean.', {"name": "Ana"}),
        (int, '{"output": 3}', 3),
        (int, "3", 3),
        (list[Item], '[{"title": "tea"}]', [{"title": "tea", "amount": 1}]),
        (list[Item], '{"output": []}', []),
        (Literal["yes", "no"], "yes", "yes"),
        (Colour, '"red"', "red"),
        (Order | None, '{"output": null}', None),
        (dict[str, int], '{"output": 1}', {"output": 1}),
        (Annotated[str, Field(max_length=3)], "abc", "abc"),
        (str | None, '"a\\u0000\\ud800"', None),
    ],
)  # fmt: skip
def test_reads_what_models_write(given: Any, text: str, data: Any) -> None:
    """Prose and code fences around the JSON do no harm, and a value that is no object needs no object around it."""
    output = _of(given)
    value = output.read(text if data is not None else '{"output": null}')
    assert output.to_json(value) == data
    assert output.restore(data) == value


@pytest.mark.parametrize(
    ("given", "text", "said"),
    [
        (Order, "Sure!", "it is not JSON"),
        (Order, '{"items": [{"title": 3, "amount": 0}]}', "items.0.title: must be a string; items.0.amount: must be"),
        (Order, '{"items": [], "items": []}', "it is not JSON"),
        (Order, "[]", "the value: must be a JSON object"),
        (int, "three", "the value: must be a valid integer"),
        (Point, '{"x": NaN, "y": 1}', "it is not JSON"),
    ],
)  # fmt: skip
def test_says_what_does_not_fit(given: Any, text: str, said: str) -> None:
    """The model reads which member is wrong, and the whole schema."""
    output = _of(given)
    with pytest.raises(ModelRetry) as caught:
        output.read(text)
    assert said in caught.value.message
    assert json.dumps(output.schema) in caught.value.message


class Options(BaseModel):
    title: str = ""
    lines: list[Item] = []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (Options, '{"title": "all", "lines": [{"title": "pen", "amount": 3}, {"title": "pa'),
        (Options, '{"lines": [{"title": "pen"}, {"title": "paper"},], "title": "all"}'),
        (Options, '{"lines": [{"title": "pen", "amount": NaN}, {"title": "paper"}], "title": "all"}'),
        (Options, '[1, {"title": "pen"}, {"ti'),
        (Options, 'Here: {"title": "a \\"} quote", "lines": [{"title": "pen"}, {"ti'),
        (Options, '```json\n{"lines": [{"title": "pen"}, {"ti'),
        (Options, "{'title': 'all', 'lines': {}}"),
        (Options, '[true, {"title": "pen"}, {"ti'),
        (Tree, '{"children": [{"children": []}, {"children": ['),
        (list[int], "[[1, 2], [3"),
        (list[int], "[ [\n[1, 2]], [[3"),
        (list[int], "[[], [3]"),
        (list[int], "[NaN, [1, 2]]"),
        (list[int], "[None, True, [1, 2]]"),
        (dict[str, Any], '{"of": {"one": 1}, "and": {"tw'),
        (Annotated[str, Field(max_length=100)], '{"output": "half of the answ'),
        (Annotated[str, Field(max_length=100)], '{\n  "output": "he said "no""}'),
    ],
)
def test_a_part_of_broken_json_is_no_answer(given: Any, text: str) -> None:
    """Of a reply that was cut off, or that is not valid, an inner object may fit a type whose members have defaults."""
    with pytest.raises(ModelRetry, match="it is not JSON"):
        _of(given).read(text)


@pytest.mark.parametrize(
    "text",
    [
        'I wrote {"lines": [{"title": "draft"},]}, which is not JSON. So: {"title": "all"}',
        'Fill in {title} and [see below] as {"title": "all"}',
        '{{"title": "all"}}',
        '["not closed" in prose, [2, 3} and ]: {"title": "all"}',
        'As [[1](source)] and [[note]] say, [None of these]: {"title": "all"}',
        'As [[a] and [[b]] say: {"title": "all"}',
    ],
)
def test_json_after_broken_json_is_the_answer(text: str) -> None:
    """The end of what is broken is known by its brackets."""
    assert _of(Options).read(text) == Options(title="all")


@pytest.mark.parametrize(
    "given", [Order, Tree, Point, Person, int, list[Item], Literal["yes", "no"], Colour, Order | None]
)
def test_schemas_can_be_enforced(given: Any) -> None:
    """The top level is an object, and each object requires all members and forbids others, as OpenAI demands."""
    schema = _of(given).schema
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    body = request_body("m", ModelRequest((Message(Role.USER, "hi"),), output=schema))
    assert body["response_format"]["json_schema"]["strict"] is True


class Found(BaseModel):
    items: Iterable[Item]


@pytest.mark.parametrize("given", [Iterable[Item], list[Iterable[int]], Found])
def test_an_iterable_is_refused(given: Any) -> None:
    """The check of its values would use them up, so that the answer would be an empty list."""
    with pytest.raises(SettingsError, match=r"agent 'shop' has output=.*; write list\[...\] in its place"):
        _of(given)


class Red(BaseModel):
    colour: Literal[Colour.RED]


class Blue(BaseModel):
    colour: Literal[Colour.BLUE]


class Painted(BaseModel):
    """No reply needs the colour."""

    colour: Literal[Colour.RED] | None = Colour.RED


@pytest.mark.parametrize(
    "given", [Literal[Colour.RED], Red, list[Red], Annotated[Red | Blue, Field(discriminator="colour")], Red | int]
)
def test_a_literal_of_a_plain_enum_is_refused(given: Any) -> None:
    """No JSON is read as such a member: each reply would be rejected, and the model asked in vain."""
    with pytest.raises(SettingsError, match=r"reads Colour\.\w+ in a Literal from no JSON; make Colour a StrEnum"):
        _of(given)
    assert _of(Painted).read("{}") == Painted()


@pytest.mark.parametrize(
    "given",
    [
        object(),
        "Order",
        lambda: 1,
        dict[str, "Missing"],  # type: ignore[name-defined]  # noqa: F821
        Point(1, 2),
        Annotated[str, Field(pattern="^(?!x)")],
    ],
)
def test_a_type_without_a_schema_is_refused(given: Any) -> None:
    """The mistake is found where the agent is declared."""
    with pytest.raises(SettingsError, match="agent 'shop' has output="):
        _of(given)


class Serialized(BaseModel):
    full_name: str = Field(serialization_alias="fullName")
    note: str = ""


class Validated(BaseModel):
    full_name: str = Field(validation_alias=AliasChoices("fullName", "name"))  # type: ignore[pydantic-alias]  # tested


class Aliased(BaseModel):
    full_name: str = Field(alias="fullName")


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = Field(alias="length")
    inner: Serialized | None = None

    @computed_field  # type: ignore[prop-decorator]  # as pydantic documents it
    @property
    def area(self) -> int:
        """The area of a square."""
        return self.size**2


class Excluded(BaseModel):
    number: int
    token: str = Field(exclude=True)


class Price(BaseModel):
    cents: Annotated[int, BeforeValidator(lambda value: round(float(value) * 100))]


class Embedded(BaseModel):
    of_text: Json[list[int]]


class Secret(BaseModel):
    password: SecretStr


@pytest.mark.parametrize(
    ("given", "text", "data"),
    [
        (Serialized, '{"full_name": "Ana"}', {"full_name": "Ana", "note": ""}),
        (list[Serialized], '[{"full_name": "Ana"}]', [{"full_name": "Ana", "note": ""}]),
        (Validated, '{"fullName": "Ana"}', {"full_name": "Ana"}),
        (Aliased, '{"fullName": "Ana"}', {"fullName": "Ana"}),
        (Computed, '{"length": 2}', {"length": 2, "inner": None}),
        (
            Computed,
            '{"length": 2, "inner": {"full_name": "Ana"}}',
            {"size": 2, "inner": {"full_name": "Ana", "note": ""}},
        ),
        (Excluded, '{"number": 1, "token": "t"}', {"number": 1, "token": "t"}),
        (Price, 'It is {"cents": "1.5"}', {"cents": "1.5"}),
        (Annotated[int, AfterValidator(lambda value: value + 1)], "3", 3),
        (Embedded, '{"of_text": "[1]"}', {"of_text": "[1]"}),
    ],
)
def test_the_data_can_be_read_again(given: Any, text: str, data: Any) -> None:
    """Whatever reads a turn's data has the value that the model's text meant."""
    output = _of(given)
    value = output.read(text)
    assert output.to_json(value, text) == data
    assert output.restore(data) == value
    answer = ask(Agent("shop", "You take orders.", output=given), "Go.", model=Scripted(text))
    assert (answer.status, answer.data) == ("done", value)


def test_a_secret_stays_hidden() -> None:
    """The data has what pydantic shows of it."""
    output, text = _of(Secret), '{"password": "hunter2"}'
    assert output.to_json(output.read(text), text) == {"password": "**********"}


@pytest.mark.parametrize(
    "value",
    [
        Serialized(full_name="Ana"),
        Validated.model_validate({"name": "Ana"}),
        Aliased(fullName="Ana"),
        Computed(length=2),
    ],
)
def test_a_script_may_have_a_value_of_the_output(value: BaseModel) -> None:
    """Its text is JSON that the output reads."""
    answer = ask(Agent("shop", "You take orders.", output=type(value)), "Go.", model=Scripted(value))
    assert (answer.status, answer.data) == ("done", value)


class Short(BaseModel):
    title: str = Field("", max_length=5)
    tags: list[str] = Field(default_factory=list, max_length=2)


class Scored(BaseModel):
    score: float


def _raises(error: BaseException) -> Callable[[Any], Any]:
    def function(value: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("given", "text", "said"),
    [
        (Short, '{"title": "much too long"}', "title: is longer than 5 characters."),
        (Short, '{"tags": ["a", "b", "c"]}', "tags: has more than 2 items."),
        (Annotated[str, Field(max_length=3)], "abcd", "the value: is longer than 3 characters."),
        (Annotated[set[int], Field(max_length=1)], "[1, 2]", "the value: has more than 1 items."),
        (
            Annotated[list[int], AfterValidator(sorted), Field(max_length=1)],
            "[2, 1]",
            "the value: is too long: the maximum",
        ),
        (Scored, '{"score": "NaN"}', "NaN and infinities are not accepted."),
        (list[Scored], '[{"score": "-inf"}]', "NaN and infinities are not accepted."),
        (float, "inf", "NaN and infinities are not accepted."),
        (Annotated[list[str], BeforeValidator(lambda value: value.split(","))], "[1]", "AttributeError: "),
        (Annotated[int, AfterValidator(_raises(KeyError("x")))], "1", "KeyError: 'x'."),
        (Annotated[int, AfterValidator(_raises(SystemExit(3)))], "1", "SystemExit: 3."),
    ],
)
def test_what_does_not_fit_is_repaired(given: Any, text: str, said: str) -> None:
    """A limit, a number without JSON and an error of the author's code are faults of the reply, not of the turn."""
    model = Scripted(text, text, text)
    answer = ask(Agent("shop", "You take orders.", output=given), "Go.", model=model)
    assert (answer.status, answer.error_code, answer.steps) == ("failed", "INVALID_RESPONSE", 3)
    assert f"Your answer could not be used: {said}" in model.requests[-1].messages[-1].content


def test_a_validator_may_answer_the_model_or_end_the_turn() -> None:
    """Errors of perdure keep their meaning."""
    model = Scripted("1", "1", "1")
    picky = Agent("shop", "You take orders.", output=Annotated[int, AfterValidator(_raises(ModelRetry("Higher!")))])
    assert ask(picky, "Go.", model=model).error_code == "INVALID_RESPONSE"
    assert "Higher!" in model.requests[-1].messages[-1].content
    strict = Agent("shop", "You take orders.", output=Annotated[int, AfterValidator(_raises(GuardRejected("No.")))])
    assert ask(strict, "Go.", model=Scripted("1")).error_code == "GUARD_REJECTED"


class Nested(RootModel[list["Nested"]]):
    """A list of lists."""


class Named(RootModel[dict[str, "Named"]]):
    """An object of objects."""


@pytest.mark.parametrize(("given", "is_wrapped"), [(Nested, True), (Named, False), (Tree, False), (Tree | None, True)])
def test_a_type_that_refers_to_itself_may_be_no_object(given: Any, is_wrapped: bool) -> None:
    """The schema for the provider is an object; it holds the list in a member."""
    schema = _of(given).schema
    assert (schema["type"], "output" in schema["properties"]) == ("object", is_wrapped)
    if given is Nested:
        assert schema["$defs"]["Nested"] == {
            "description": "A list of lists.", "type": "array", "items": {"$ref": "#/$defs/Nested"},
        }  # fmt: skip
        assert _of(given).read('{"output": [[], [[]]]}') == Nested([Nested([]), Nested([Nested([])])])
