"""The output of an agent: a value of a type that the author declares, which the engine reads from the model's text.

    class Order(BaseModel):
        item: str
        amount: int

    Agent("shop", "You take orders.", output=Order)

The model gets the type's JSON schema. A reply that does not fit, or that the agent's `check_output` refuses, is
committed like any other step, with the reason, and the model is asked again. After `MOST_REPAIRS` of them the turn
fails with `INVALID_RESPONSE`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import SchemaError

from perdure.errors import ModelRetry, PerdureError, SettingsError
from perdure.models.schemas import WithoutTitles, enforceable
from perdure.text import declarations, untrusted
from perdure.text.json_replies import begins_json, values_in, without_fence

log = logging.getLogger(__name__)

MOST_REPAIRS = 2
"""How often the model is asked again in one turn, because its reply is no output of the agent."""

_MEMBER = "output"
"""The member with the value of a type whose JSON is no object. Providers require an object."""

_MOST_PROBLEMS = 10
_MOST_CHARS = 2_000
_MOST_SCHEMA_CHARS = 8_000


class OutputType:
    """The type of an agent's output.

    Attributes:
        adapter: The type, as pydantic knows it.
        schema: The JSON schema for the model, whose top level is an object.
    """

    def __init__(self, given: Any, owner: str) -> None:
        """`given` is a type that pydantic knows, and `owner` names the agent in the message of an error.

        Raises:
            SettingsError: pydantic has no JSON schema for the type.
        """
        if inspect.isroutine(given):
            declarations.require(False, owner, "output", given, "a type")  # noqa: FBT003 (pydantic takes it for a type)
        try:
            self.adapter: TypeAdapter[Any] = TypeAdapter(given)
            schema = self.adapter.json_schema(schema_generator=_OfOutputs)
        except (PydanticUserError, SchemaError, TypeError, NameError, AttributeError) as error:
            raise SettingsError(
                f"{owner} has output={declarations.shown(given)}; accepted: a model of pydantic, a dataclass, a "
                f"TypedDict or another type with a JSON schema ({declarations.reason(error)})"
            ) from error
        self._is_wrapped = definition(schema).get("type") != "object"
        if self._is_wrapped:
            definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
            schema = {"type": "object", "properties": {_MEMBER: schema}, **definitions}
        self.schema: Mapping[str, Any] = enforceable(schema)

    def read(self, text: str) -> Any:
        """The value that a model wrote as `text`, in prose or code fences perhaps.

        Raises:
            ModelRetry: it does not fit the type. The message, for the model, has the problems and the schema.
            PerdureError: raised by a validator of the type.
        """
        faults = []
        for written in self.written(text):
            try:
                return self.parse(written)
            except PerdureError:
                raise
            except untrusted.OF_AUTHORS as error:
                faults.append(_problems(error))
        fault = faults[0] if faults else "it is not JSON"
        schema = json.dumps(self.schema, ensure_ascii=False)
        raise ModelRetry(
            f"Your answer could not be used: {untrusted.storable(untrusted.cut(fault, _MOST_CHARS))}. Answer again "
            f"with nothing but a JSON object that fits this schema: {untrusted.cut(schema, _MOST_SCHEMA_CHARS)}"
        )

    def parse(self, written: Any, *, strict: bool | None = None) -> Any:
        """The value of JSON values that a model or a user wrote. `strict` overrides the type's own strictness.

        Raises:
            ValueError: they do not fit the type.
            Exception: raised by a validator of the type.
        """
        value = self.adapter.validate_json(json.dumps(written), strict=strict, by_name=True)
        if not untrusted.is_finite(self.adapter.dump_python(value, mode="json")):
            raise ValueError("NaN and infinities are not accepted")
        return value

    def restore(self, data: Any) -> Any:
        """The value that `to_json` made `data` from.

        Raises:
            ValidationError: the type has changed since, and the data does not fit it.
        """
        return self.adapter.validate_json(json.dumps(data), by_name=True)

    def to_json(self, value: Any, text: str | None = None) -> Any:
        """A value of the type as JSON values that PostgreSQL stores, and that `restore` accepts.

        `text` is what a model wrote, if `read` made the value from it. Its JSON is the result if no JSON that pydantic
        makes from the value means the same value, for example because a validator multiplies a number.

        Raises:
            PydanticSerializationError: the value has no JSON form.
        """
        for form in _FORMS:
            if self._is_restored(data := self._dump(value, form), form):
                return data
        found = None if text is None else next(self._fitting(text), None)
        return self._dump(value, _FORMS[0]) if found is None else untrusted.storable_json(found)

    def _dump(self, value: Any, form: Mapping[str, Any]) -> Any:
        return untrusted.storable_json(self.adapter.dump_python(value, mode="json", **form))

    def _is_restored(self, data: Any, form: Mapping[str, Any]) -> bool:
        """Whether `restore` makes the value from `data` that has this JSON."""
        try:
            return bool(self._dump(self.restore(data), form) == data)
        except untrusted.OF_AUTHORS:
            return False

    def _fitting(self, text: str) -> Iterator[Any]:
        """The JSON values in `text` that fit the type."""
        for written in self.written(text):
            with contextlib.suppress(*untrusted.OF_AUTHORS):
                self.parse(written)
                yield written

    def written(self, text: str) -> Iterator[Any]:
        """The JSON values that the text may mean, the whole text first. JSON that was cut off means nothing."""
        text = without_fence(text.strip())
        try:
            whole, end = untrusted.load_value(text, 0)
            found = [whole] if end == len(text) else []
        except ValueError:
            found = []
        for each in found or [*values_in(text)]:
            if self._is_wrapped and isinstance(each, dict) and each.keys() == {_MEMBER}:
                yield each[_MEMBER]
            else:
                yield each
        if self._is_wrapped and not found and not begins_json(text):  # a bare word of an enumeration
            yield text


class _OfOutputs(WithoutTitles):
    """Refuses `Iterable`: pydantic reads its values once, and an output is read again for its JSON and its checks."""

    def generator_schema(self, schema: Any) -> NoReturn:  # noqa: ARG002 (the parent's signature)
        raise PydanticInvalidForJsonSchema("an Iterable can be read only once; write list[...] in its place")


def definition(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a schema made by pydantic is, or refers to."""
    definitions, found = schema.get("$defs", {}), schema
    for _ in definitions:
        found = definitions.get(str(found.get("$ref")).removeprefix("#/$defs/"), found)
    return found


_FORMS: tuple[Mapping[str, Any], ...] = (
    {"by_alias": True},
    {"by_alias": True, "round_trip": True},  # without computed fields
    {"by_alias": False, "round_trip": True},  # without names that are for serialization only
)
"""How pydantic makes JSON of a value. The first one that can be read again is used."""


def _problems(error: BaseException) -> str:
    if not isinstance(error, ValidationError):
        if not isinstance(error, ValueError):
            log.error("a validator of an output failed, so the output is refused", exc_info=error)
        return untrusted.error_summary(error).removeprefix("ValueError: ")
    items = error.errors(include_url=False, include_input=False)
    shown = [f"{untrusted.member_path(each) or 'the value'}: {untrusted.what_is_wrong(each)}" for each in items]
    more = [f"{len(shown) - _MOST_PROBLEMS} more"] if len(shown) > _MOST_PROBLEMS else []
    return "; ".join([*shown[:_MOST_PROBLEMS], *more])
