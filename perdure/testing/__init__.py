"""Unit tests for agents, without PostgreSQL, Redis or Celery.

`ask` runs one turn of an agent against a `Scripted` model. `Conversation` runs several turns of one session. Both run
the engine's own step loop (`perdure.turns`) on a store in memory. docs/testing.md lists the code of the engine that
`ask` and `Conversation` do not exercise.

`perdure.testing.suites` contains behavioural tests for third-party models, embedders, channels and snapshot stores.
Only `perdure.testing.suites` needs pytest.
"""

from perdure.clock import MovedClock
from perdure.testing.conversation import Answer, Call, Conversation, ask
from perdure.testing.recorded import recorded
from perdure.testing.scripted import Scripted, ScriptExhausted, call, late

__all__ = [
    "Answer",
    "Call",
    "Conversation",
    "MovedClock",
    "ScriptExhausted",
    "Scripted",
    "ask",
    "call",
    "late",
    "recorded",
]
