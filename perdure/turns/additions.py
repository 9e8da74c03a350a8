"""What the client of a turn adds to its agent, for this turn only: tools, settings, instructions and an output.

The OpenAI-compatible endpoints make them from a request. They are stored with the turn (`turns.additions`), so that
each worker uses the same. The client runs the calls of its tools: the turn waits for the results, as for those of an
`external_tool`. The additions of the request that brings the results replace those of the request before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from perdure.errors import ModelRetry
from perdure.models.protocol import unknown_members
from perdure.text import untrusted
from perdure.text.json_replies import without_fence
from perdure.tools.awaited.external import ExternalTool, external_tool

MAX_TOOLS = 128
MAX_CHARS = 200_000
"""The most characters of a turn's additions, as JSON."""

_KNOWN = frozenset({"tools", "names", "settings", "instructions", "output", "remember"})
_MOST_SCHEMA_CHARS = 8_000


class RequestedOutput:
    """The output that a client asks for, by its JSON schema. The counterpart of `output.OutputType`.

    The model's provider enforces the schema. Only the form is checked here: a client's schema may refer to other
    servers, and its patterns may take forever.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema

    def read(self, text: str) -> Any:
        """The object that a model wrote as `text`.

        Raises:
            ModelRetry: it is not a JSON object.
        """
        try:
            return untrusted.load_object(without_fence(text.strip()))
        except ValueError:
            schema = untrusted.cut(json.dumps(self.schema, ensure_ascii=False), _MOST_SCHEMA_CHARS)
            raise ModelRetry(
                "Your answer could not be used: it is no JSON object. Answer again with nothing but a JSON object that "
                f"fits this schema: {schema}"
            ) from None

    def to_json(self, value: Any, text: str | None = None) -> Any:  # noqa: ARG002 (as OutputType)
        """A value that `read` returned, as JSON values that PostgreSQL stores."""
        return untrusted.storable_json(value)


@dataclass(frozen=True)
class Additions:
    """What a client adds to the agent of one turn.

    `names` are those of all tools that the turn's requests have had. `output` is a JSON schema that the reply must fit.
    `remember` is false if nothing of the turn may be remembered. `extra` holds the stored members that this release
    does not know.
    """

    tools: tuple[ExternalTool, ...] = ()
    names: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    instructions: str | None = None
    output: Mapping[str, Any] | None = None
    remember: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def output_type(self) -> RequestedOutput | None:
        """The output that the reply must be."""
        return None if self.output is None else RequestedOutput(self.output)

    def to_dict(self) -> dict[str, Any] | None:
        """The stored form; `None` without any addition."""
        tools = [
            {"name": each.name, "description": each.description, "parameters": each.parameters} for each in self.tools
        ]
        found = {
            "tools": tools,
            "names": list(self.names),
            "settings": dict(self.settings),
            "instructions": self.instructions,
            "output": self.output,
        }
        kept = {name: value for name, value in found.items() if value}
        return {**self.extra, **kept, **({} if self.remember else {"remember": False})} or None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any] | None) -> Self:
        """The additions of their stored form.

        Raises:
            SettingsError, LookupError, TypeError: this release cannot read them.
        """
        if record is None:
            return cls()
        return cls(
            tuple(client_tool(**each) for each in record.get("tools", ())),
            tuple(record.get("names", ())),
            record.get("settings", {}),
            record.get("instructions"),
            record.get("output"),
            record.get("remember", True) is not False,
            unknown_members(record, _KNOWN),
        )

    def after(self, before: Additions) -> Additions:
        """These additions of a later request of a turn that had the additions `before`."""
        names = dict.fromkeys((*before.names, *self.names))
        remember = self.remember and before.remember
        return replace(self, names=tuple(names), remember=remember, extra={**before.extra, **self.extra})

    def over(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The agent's `settings`, replaced by the client's. A client may lower the limit of tokens, and not raise it.

        >>> Additions(settings={"max_tokens": 500, "seed": 1}).over({"max_tokens": 200, "top_p": 0.5})
        {'max_tokens': 200, 'top_p': 0.5, 'seed': 1}
        """
        limits = [each["max_tokens"] for each in (settings, self.settings) if each.get("max_tokens") is not None]
        return {**settings, **self.settings, **({"max_tokens": min(limits)} if limits else {})}

    def instructed(self, instructions: str) -> str:
        """The agent's instructions, and those of the client after them."""
        return "\n\n".join(each for each in (instructions, self.instructions) if each)


NO_ADDITIONS = Additions()


def client_tool(name: str, description: str, parameters: Mapping[str, Any]) -> ExternalTool:
    """A tool whose calls the client of the turn runs. Its time limit is that of an approval.

    Raises:
        SettingsError: the name or the schema cannot be used.
    """
    return external_tool(name, description or name, parameters or None)
