"""Types of outputs: their schemas, and what counts as a value of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from perdure.errors import ModelRetry, SettingsError
from perdure.models.protocol import Message, ModelRequest, Role
from perdure.models.providers.chat_wire import request_body
from perdure.output import OutputType


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
        (Order, '{"items": [], "items": []}', "the value: must be a JSON object"),
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


@pytest.mark.parametrize(
    "given", [Order, Tree, Point, Person, int, list[Item], Literal["yes", "no"], Colour, Order | None]
)
def test_schemas_can_be_enforced(given: Any) -> None:
    """The top level is an object, and each object requires all members and forbids others, as OpenAI demands."""
    schema = _of(given).schema
    assert (schema["type"], schema["additionalProperties"]) == ("object", False)
    body = request_body("m", ModelRequest((Message(Role.USER, "hi"),), output=schema))
    assert body["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize("given", [object(), "Order", lambda: 1, dict[str, "Missing"]])  # type: ignore[name-defined]  # noqa: F821
def test_a_type_without_a_schema_is_refused(given: Any) -> None:
    """The mistake is found where the agent is declared."""
    with pytest.raises(SettingsError, match="agent 'shop' has output="):
        _of(given)
