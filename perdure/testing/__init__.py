"""Unit tests for agents, without PostgreSQL, Redis or Celery.

`ask` runs one turn of an agent against a `Scripted` model. `Conversation` runs several turns of one session. Both run
the engine's own step loop (`perdure.turns`) on a store in memory. docs/testing.md lists the code of the engine that
`ask` and `Conversation` do not exercise.

`perdure.testing.suites` contains behavioural tests for third-party models, embedders, channels and snapshot stores.
Only `perdure.testing.suites` needs pytest.

`certify` runs the tools of a module on real workers and kills these; it is imported on use, because it needs all of
perdure (`perdure.certify`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perdure.clock import MovedClock
from perdure.testing.conversation import Answer, Call, Conversation, ask
from perdure.testing.recorded import recorded
from perdure.testing.scripted import Scripted, ScriptExhausted, call, late

if TYPE_CHECKING:
    from perdure.certify.certification import Certification, Scenario
    from perdure.certify.run import certify

__all__ = [
    "Answer",
    "Call",
    "Certification",
    "Conversation",
    "MovedClock",
    "Scenario",
    "ScriptExhausted",
    "Scripted",
    "ask",
    "call",
    "certify",
    "late",
    "recorded",
]

_ON_USE = {
    "Certification": "perdure.certify.certification",
    "Scenario": "perdure.certify.certification",
    "certify": "perdure.certify.run",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ON_USE[name]), name)
