"""`ask_user`: a tool with which the model asks the user a question, and waits until the answer fits a type.

    class Address(BaseModel):
        street: str
        city: str

    Agent("shop", "You take orders.", tools=[ask_user(Address, name="ask_address")])

The turn is parked. The user's next message of the turn's channel is the answer, and begins no turn. An answer that does
not fit is refused with a sentence for the user, and the question is asked again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from perdure.errors import ToolError
from perdure.models.protocol import ToolSchema
from perdure.output import OutputType, definition
from perdure.text import declarations, untrusted
from perdure.tools.awaited.declared import Asleep, is_description, parse_text, require_answered_in
from perdure.tools.registry import refusal_of, require_name

log = logging.getLogger(__name__)

TRIES = 3
"""How many answers may not fit before the model reads what the user said."""

MAX_QUESTION_CHARS = 2_000

_MOST_TRIES = 10
_MOST_CHOICES = 20

_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "The question, as the user reads it."}},
    "required": ["question"],
    "additionalProperties": False,
}


class Misfit(Exception):
    """The user's answer does not fit. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True, eq=False)
class AskUser(Asleep):
    """A tool that asks the user; see `sources.RunnableTool`. Make one with `ask_user`.

    A question that has no answer `timeout_s` seconds after it was asked fails. `None`: `PERDURE_APPROVAL__EXPIRES_S`.
    """

    waits_for: ClassVar[str] = "user"
    parameters: ClassVar[Mapping[str, Any]] = _PARAMETERS

    name: str
    description: str
    timeout_s: float | None
    tries: int
    _type: OutputType

    def schema(self) -> ToolSchema:
        return ToolSchema(self.name, self.description, self.parameters)

    def parse(self, arguments: str) -> dict[str, Any]:
        """Check that the arguments are a strict JSON object with the string `question` and no other key.

        Raises:
            ToolError: the arguments are anything else; the message is for the model.
        """
        given = parse_text(arguments, "question", _refusal)
        if len(given["question"]) > MAX_QUESTION_CHARS:
            raise _refusal(f"the question has more than {MAX_QUESTION_CHARS} characters")
        return given

    def read(self, answer: Any, *, is_text: bool) -> str:
        """The answer as a value of the type, as text for the model. `answer` is what the user wrote, or a JSON value.

        Raises:
            Misfit: it does not fit.
        """
        fault: ValidationError | None = None
        for candidate in self._candidates(answer) if is_text else (answer,):
            try:
                # A person's text has no types, so a strict type reads it as others do.
                value = self._type.parse(candidate, strict=False if is_text else None)
            except untrusted.OF_AUTHORS as error:
                fault = error if isinstance(error, ValidationError) else None
                if not isinstance(error, ValueError):
                    log.exception("a validator of the answer to %s failed, so the answer is refused", self.name)
                continue
            data = self._type.to_json(value)
            return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        raise Misfit(self._sentence(fault))

    def _candidates(self, text: str) -> Iterator[Any]:
        """The values that a user's text may mean, the most literal first: itself, a choice, JSON, lines of members.

        What is wrong with the last one is what the user reads.
        """
        bare = text.strip()
        plain = bare.rstrip(".!")
        choices = {str(choice).casefold(): choice for choice in self._choices()}
        if plain.casefold() in choices:
            yield choices[plain.casefold()]
        members = self._members()
        if not members:
            yield bare
            yield from [plain] if plain not in {bare, ""} else []
        written = [*self._type.written(bare)]
        yield from written
        lines = dict(_lines(bare, members))
        if members and (lines or not any(isinstance(each, dict) for each in written)):
            yield lines

    def _members(self) -> dict[str, Any]:
        """The members of the type, if its values are objects."""
        return dict(definition(self._type.adapter.json_schema()).get("properties", {}))

    def _choices(self) -> list[Any]:
        schema = definition(self._type.adapter.json_schema())
        return list(schema.get("enum", [schema["const"]] if "const" in schema else []))

    def _sentence(self, fault: ValidationError | None) -> str:
        """What is missing, for the user."""
        schema, choices, members = self._type.adapter.json_schema(), self._choices(), self._members()
        if choices:
            shown = ", ".join(map(str, choices[:_MOST_CHOICES]))
            return f"Please answer with one of: {shown}."
        if schema.get("type") == "boolean":
            return "Please answer yes or no."
        if schema.get("type") in {"integer", "number"} and (fault is None or "parsing" in fault.errors()[0]["type"]):
            return "Please answer with a number."
        if members and fault is not None:
            found = {str(each["loc"][0]): each for each in fault.errors(include_url=False) if each["loc"]}
            if found:
                named = "; ".join(f"{name}: {untrusted.what_is_wrong(each)}" for name, each in found.items())
                lines = ", ".join(f"`{name}: …`" for name in found)
                return f"Please complete your answer ({named}). Write a line for each: {lines}"
        problem = "" if fault is None else f": {untrusted.what_is_wrong(fault.errors(include_url=False)[0])}"
        return f"This answer cannot be used{problem}. Please answer again."


def ask_user(
    answer: Any = str,
    *,
    name: str = "ask_user",
    description: str | None = None,
    timeout_s: float | None = None,
    tries: int = TRIES,
) -> AskUser:
    """Make a tool with which the model asks the user a question, and waits for an answer of the type `answer`.

    `answer` is a type that `Agent(output=…)` accepts, such as `str`, `bool`, `Literal["S", "M"]` or a model of
    pydantic. The user answers with their next message: in words for a simple type; for an object, with a line
    `name: value` for each member, or JSON. After `tries` answers that do not fit, the model reads what the user said,
    as a failed result. The call also fails if there is no answer within `timeout_s` seconds, by default
    `PERDURE_APPROVAL__EXPIRES_S`.

    Raises:
        SettingsError: a value is invalid; the message names it.

    Example:
        >>> from typing import Literal
        >>> size = ask_user(Literal["small", "large"], name="ask_size", description="Ask for the size.")
        >>> barista = Agent("barista", "You take orders.", tools=[size])
        >>> model = Scripted(call("ask_size", question="Which size?"), "One large tea.")
        >>> ask(barista, "Tea, please.", model=model, answers=["huge", "Large!"]).calls[0].result
        'large'
    """
    require_name("ask_user", name)
    owner = f"the ask_user tool {name!r}"
    is_told = description is None or is_description(description)
    declarations.require(is_told, owner, "description", description, "text for the model")
    require_answered_in(owner, timeout_s)
    declarations.require(
        declarations.is_count(tries) and tries <= _MOST_TRIES, owner, "tries", tries, f"1 to {_MOST_TRIES}"
    )
    kind = OutputType(answer, owner)
    told = description or "Ask the user a question, and wait for the answer."
    if kind.adapter.json_schema().get("type") != "string":
        shown = json.dumps(kind.adapter.json_schema(), ensure_ascii=False)
        told = f"{told} The answer fits this schema: {untrusted.cut(shown, MAX_QUESTION_CHARS)}"
    return AskUser(name, told, timeout_s, tries, kind)


def _lines(text: str, members: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The members that a text has as lines `name: value`. A name may be in any case, with spaces for `_`."""
    known = {name.casefold(): name for name in members}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        found = known.get("_".join(name.casefold().split()))
        if separator and found is not None and value.strip():
            yield found, value.strip()


def _refusal(reason: str) -> ToolError:
    return refusal_of("Not asked", reason, _PARAMETERS)
