"""Unit tests for agents, without PostgreSQL, Redis or Celery.

`ask` runs one turn of an agent against a `Scripted` model; `Conversation` runs several. Both run the engine's own step
loop (`perdure.turns`) on a store in memory; docs/testing.md lists the code that they do not exercise.
`perdure.testing.suites` holds the behavioural tests for third-party models, embedders, channels and snapshot stores.
Only `perdure.testing.suites` needs pytest.
"""

from perdure.clock import MovedClock
from perdure.testing.conversation import Answer, Call, Conversation, ask
from perdure.testing.scripted import Scripted, ScriptExhausted, call, late

__all__ = ["Answer", "Call", "Conversation", "MovedClock", "ScriptExhausted", "Scripted", "ask", "call", "late"]
