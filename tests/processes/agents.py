"""The PERDURE_AGENTS module of the workers in these tests: tools of every effect class, with injected faults.

After the import, the process records each commit boundary in the test's fault directory, and executes the fault that is
armed for the boundary. The import also shortens waits that have no setting: two in `outbox`, one in `awaited` and two
in `presence`. If the environment variable named by `SILENCE_S` is set, its value replaces the watchdog's minimum time
limit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

from perdure import Agent, celery_tool, external_tool, tool
from perdure.database.engine import Database
from perdure.observe import presence
from perdure.tools.registry import DidNotHappen, Happened, ProbeOutcome, ToolContext
from perdure.turns import outbox
from perdure.turns.calls import awaited
from perdure.workers.watchdog import heartbeat
from tests.processes.faults import SCENE, SILENCE_S, Effect, Faults, done
from tests.processes.model_server import OUTSIDE

ATTEMPT_S = 1.5
RETRY_S = 0.5
PROBE_S = 0.5
PRESENCE_S = 0.5
TASK_TIMEOUT_S = 8.0

_FROZEN_S = 600

_faults = Faults(Path(os.environ[SCENE]))


def _notify(_database: Database, moment: str, name: str) -> None:
    _faults.pass_by(moment, name)


mock.patch.object(Database, "_notify", _notify).start()
mock.patch.object(outbox, "ATTEMPT_S", ATTEMPT_S).start()
mock.patch.object(outbox, "FIRST_RETRY_S", RETRY_S).start()
mock.patch.object(awaited, "LEAST_PROBE_S", PROBE_S).start()
mock.patch.object(presence, "EVERY_S", PRESENCE_S).start()
mock.patch.object(presence, "GONE_S", 3 * PRESENCE_S).start()
if SILENCE_S in os.environ:
    mock.patch.object(heartbeat, "LEAST_LIMIT_S", float(os.environ[SILENCE_S])).start()


def _act(name: str, note: str, context: ToolContext) -> str:
    entered = time.monotonic()
    _faults.pass_by("within", f"{name}.entered")
    _faults.act(Effect(name, str(context.effect_id), note, os.getpid(), time.monotonic() - entered))
    _faults.pass_by("within", f"{name}.acted")
    return done(name, note)


@tool(effect="pure")
def pure(note: str, context: ToolContext) -> str:
    """May be repeated freely."""
    return _act("pure", note, context)


@tool(effect="idempotent")
def idempotent(note: str, context: ToolContext) -> str:
    """May be repeated with the same effect id."""
    return _act("idempotent", note, context)


@tool(effect="unsafe")
def unsafe(note: str, context: ToolContext) -> str:
    """Must not be repeated."""
    return _act("unsafe", note, context)


def _probe(context: ToolContext) -> ProbeOutcome:
    for effect in _faults.effects():
        if effect.effect_id == str(context.effect_id):
            return Happened(done(effect.tool, effect.note))
    return DidNotHappen()


@tool(effect="unsafe", probe=_probe)
def probed(note: str, context: ToolContext) -> str:
    """Must not be repeated; a probe reports whether the effect happened."""
    return _act("probed", note, context)


@tool(effect="pure")
def deadly(note: str, context: ToolContext) -> str:
    """Kills the process that it runs in, each time."""
    _act("deadly", note, context)
    os.kill(os.getpid(), signal.SIGKILL)
    return "unreachable"


@tool(effect="pure")
def stuck(note: str, context: ToolContext) -> str:
    """Never returns from its first call."""
    result = _act("stuck", note, context)
    if len(_faults.effects(note)) == 1:
        threading.Event().wait()
    return result


@tool(effect="unsafe", requires_approval=True)
def guarded(note: str, context: ToolContext) -> str:
    """Runs only after a person's approval."""
    return _act("guarded", note, context)


@tool(effect="unsafe")
def hanging(note: str, context: ToolContext) -> str:
    """Never returns."""
    _act("hanging", note, context)
    threading.Event().wait()
    return "unreachable"


@tool(effect="unsafe")
def slow(note: str, context: ToolContext) -> str:
    """Takes effect at once, and returns when the test allows it."""
    result = _act("slow", note, context)
    _faults.wait_released()
    return result


@tool(effect="pure")
def frozen(note: str, context: ToolContext) -> str:
    """Holds Python's interpreter lock for `_FROZEN_S` seconds, so that no Python thread of its process runs."""
    _act("frozen", note, context)
    ctypes.PyDLL(None).sleep(_FROZEN_S)
    return "unreachable"


tools: list[Any] = [pure, idempotent, unsafe, probed, deadly, stuck, slow, guarded, hanging, frozen]
tools += [
    celery_tool("reports.make", name="report", effect="idempotent", timeout_s=60),
    celery_tool("reports.make", name="reports", effect="idempotent", timeout_s=60, max_parallel=2),
    celery_tool("reports.charge", name="charge", timeout_s=TASK_TIMEOUT_S),
    celery_tool("reports.slow", name="slowly", timeout_s=60),
    celery_tool("reports.step", name="stepping", timeout_s=60),
    celery_tool("reports.fail", name="fails", timeout_s=60),
    celery_tool("reports.odd", name="odd", timeout_s=60),
    celery_tool("reports.silent", name="silent", timeout_s=60),
    celery_tool("reports.nobodys", name="nobodys", timeout_s=60),
]
tester = Agent("tester", "You are under test.", tools=[*tools, external_tool(OUTSIDE, "A client runs it.")])
