"""Traces of turns with OpenTelemetry: what the rest of perdure calls. `perdure.observe.otel` implements it.

Tracing is off unless the environment names a receiver, as OpenTelemetry's SDK reads it (`is_configured`). While it is
off, each method here does nothing, and no statement is run.

The ids of spans follow from those of turns and calls. So a worker knows the span of a call before any process exports
it, and a turn that several workers run has one trace:

    accept                        the process that accepts the message
    ├─ queue                      from accept to the first claim
    ├─ invoke_agent AGENT         from the first claim to the commit that settles the turn
    │  ├─ chat MODEL              from the commit before it to the commit of the reply
    │  └─ execute_tool TOOL       from its intent to its result; an agent's call contains the trace of its turn
    └─ deliver                    each attempt

All but `accept` and `deliver` are made from the committed rows, when the turn is settled. A step that a killed worker
had committed is among them, and one that it had not is not, however often it began.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

if TYPE_CHECKING:
    from perdure.database.engine import Database

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


DELIVERED, NOT_DUE = "delivered", "not due"


class Attempt(Protocol):
    """A delivery's attempt, whose span ends with the block."""

    def ended(self, outcome: str) -> None:
        """How the attempt has ended: `delivered`, `not due` if there was none, or else a failure."""
        ...


class _NoAttempt:
    def ended(self, outcome: str) -> None:
        pass


class Traces:
    """Traces nothing. The subclass `otel.OtelTraces` does."""

    is_on = False

    def accepting(self, turn_id: UUID) -> AbstractContextManager[str | None]:  # noqa: ARG002 (for the subclass)
        """Trace the accept of a message; yields the `traceparent` to store with its turn."""
        return nullcontext()

    def calling(
        self,
        turn_id: UUID,  # noqa: ARG002 (for the subclass)
        traceparent: str | None,  # noqa: ARG002 (the same)
        *,
        step: int | None = None,  # noqa: ARG002 (the same)
        effect_id: UUID | None = None,  # noqa: ARG002 (the same)
    ) -> AbstractContextManager[None]:
        """Make the span of the model call `step`, or of the call `effect_id`, the current one of this thread."""
        return nullcontext()

    def settled(self, turn_id: UUID) -> None:
        """Export the spans of a turn that is settled. Returns at once."""

    def delivering(self, delivery_id: UUID) -> AbstractContextManager[Attempt]:  # noqa: ARG002 (for the subclass)
        """Trace an attempt of a delivery."""
        return nullcontext(_NoAttempt())

    def headers(self) -> dict[str, str]:
        """The headers that tell a receiver the current span."""
        return {}

    def joined(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:  # noqa: ARG002 (for the subclass)
        """Make the span that a sender has put into `headers` the current one, unless there is a current one."""
        return nullcontext()

    def close(self) -> None:
        """Export what is left, within seconds."""


OFF = Traces()


def is_configured(environment: Mapping[str, str]) -> bool:
    """Whether the variables of OpenTelemetry's SDK ask for traces.

    >>> is_configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    True
    >>> is_configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"})
    False
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter == "otlp" or (exporter == "" and any(environment.get(each) for each in _ENDPOINTS))


def configured(database: Database) -> Traces:
    """The traces of this process. If the packages of the extra `otel` are missing, logs that once, and traces nothing.

    Raises:
        SettingsError: a variable asks for a protocol that perdure does not speak.
    """
    if not is_configured(os.environ):
        return OFF
    try:
        from perdure.observe.otel import OtelTraces  # noqa: PLC0415 (the packages are optional)
    except ImportError as error:
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is traced: pip install 'perdure[otel]' (%s)", error.name
        )
        return OFF
    return OtelTraces.from_environment(database)
