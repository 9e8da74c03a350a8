"""The CaseBank's Celery tasks: their results, their schedule, and the resumption of runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from standardwebhooks import Webhook

from perdure.casebank.cases import read
from perdure.casebank.runs import prune, state
from perdure.casebank.search import search
from perdure.channels.notices import bank_of
from perdure.clock import MovedClock
from perdure.errors import ProviderError
from perdure.models.embedders.hashing import HashEmbedder
from perdure.runtime import Runtime
from perdure.schedules.entries import active_entries
from perdure.settings import CasebankSettings, PruneApproval
from perdure.tasks import casebank
from perdure.tasks.process import Process
from perdure.timetable.entry import HEADER
from perdure.turns.run.loop import Runner
from perdure.workers.celery_application import load_tasks
from tests.casebank.bank import NOW, column, put, statuses, use
from tests.channels.test_callback import Receiver, receiver
from tests.turns.prompt.test_briefing import _Away

__all__ = ["receiver"]

Call = Callable[..., Any]


def _calling(runtime: Runtime, entry: str | None = None, leaving: threading.Event | None = None) -> Call:
    """A function that runs a task eagerly, in this process.

    If `entry` is given, the task runs as if this entry of the schedule had started it. Otherwise, it runs as a direct
    call. While the event `leaving` is set, the task's worker process counts as shutting down.
    """
    app = Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)
    load_tasks(app)
    assert casebank.prune.name in app.tasks
    found = active_entries(app.tasks, runtime.settings)
    process = Process(
        runtime, Runner(runtime, "tests"), {}, lambda _: None, found, leaving=leaving or threading.Event()
    )
    app.perdure = lambda: process
    headers = {HEADER: entry} if entry else {}
    return lambda name, **arguments: app.tasks[name].apply(kwargs=arguments, headers=headers, throw=True).get()


def _with(runtime: Runtime, **limits: Any) -> Runtime:
    changed = runtime.settings.model_copy(update={"casebank": CasebankSettings(load_percent=100, **limits)})
    return replace(runtime, settings=changed)


def test_pruning_is_a_dry_run_by_default(runtime: Runtime) -> None:
    """By default, `casebank.prune` is a dry run. It returns the same details as a run with `dry_run=False`."""
    call = _calling(_with(runtime))
    put(runtime.database, "bad", usage=20, rate=10)
    put(runtime.database, "good", usage=20, rate=90)
    planned = call("casebank.prune")
    assert (planned["removed_cases"], planned["dry_run"], planned["run_id"]) == (1, True, None)
    assert set(statuses(runtime.database).values()) == {"active"}
    done = call("casebank.prune", dry_run=False)
    assert (done["removed_cases"], done["dry_run"], done["phase"]) == (1, False, "done")
    assert done["details"] == planned["details"]
    assert statuses(runtime.database) == {"bad": "archived", "good": "active"}


def test_a_result_quotes_no_case(runtime: Runtime) -> None:
    """A task's result quotes no case, because the result backend and Flower keep results after an author's erasure."""
    call = _calling(_with(runtime))
    for number in ("4711", "1234"):
        put(runtime.database, f"pin {number}", query=f"Is the PIN of the card {number}?", vector=[1, 0, 0, 0])
    full = prune.dry_run(bank_of(_with(runtime)))["details"]["spared"]
    assert "4711 / 1234" in full[0]["reason"] or "1234 / 4711" in full[0]["reason"]
    (line,) = call("casebank.prune")["details"]["spared"]
    assert line["reason"].endswith("but they differ in a number")
    assert line == {**full[0], "reason": line["reason"]}


def test_an_approved_run_is_resumed_and_an_old_plan_expires(runtime: Runtime, clock: MovedClock) -> None:
    """`casebank.advance` applies an approved plan, and expires a plan whose time for approval has passed."""
    manual = _with(runtime, approval=PruneApproval.MANUAL, approval_expires_s=3_600)
    call = _calling(manual)
    put(runtime.database, "bad", usage=20, rate=10)
    waits = prune.run(bank_of(manual))
    assert call("casebank.advance") is None
    clock.advance(timedelta(hours=1, seconds=1))
    assert call("casebank.advance") is None
    assert state.list_runs(runtime.database)[0]["phase"] == "expired"
    again = prune.run(bank_of(manual))
    assert again["run_id"] != waits["run_id"]
    state.approve(runtime.database, UUID(again["run_id"]), "somebody")
    assert call("casebank.advance")["removed_cases"] == 1
    assert statuses(runtime.database) == {"bad": "archived"}


def test_the_weekly_run_is_skipped_while_a_plan_waits(
    runtime: Runtime, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    """While a plan waits for approval, the scheduled run is skipped without an error, and a direct call is refused."""
    caplog.set_level("INFO")
    manual = _with(runtime, approval=PruneApproval.MANUAL, approval_expires_s=30 * 86_400)
    put(runtime.database, "bad", usage=20, rate=10)
    waits = prune.run(bank_of(manual))
    by_hand, weekly = _calling(manual), _calling(manual, "prune")
    by_hand("casebank.prune", dry_run=False)
    assert "refused: CONFLICT" in caplog.text
    weekly("casebank.prune", dry_run=False)  # runs nothing: a new schedule entry begins with its next slot
    clock.advance(timedelta(days=7))
    assert weekly("casebank.prune", dry_run=False) is None
    assert "this week's run of the CaseBank is skipped" in caplog.text
    assert [each["run_id"] for each in state.list_runs(runtime.database)] == [waits["run_id"]]


def test_another_process_continues_the_run_of_one_that_shuts_down(runtime: Runtime) -> None:
    """If a process shuts down during a run, its task ends without an error, and another process resumes the run."""
    parts = _with(runtime, duplicate_batch=1)
    for number in range(4):
        put(runtime.database, f"bad{number}", usage=20, rate=10)
    leaving = threading.Event()
    leaving.set()
    left = _calling(parts, leaving=leaving)("casebank.prune", dry_run=False)
    assert (left["phase"], state.list_runs(runtime.database)[0]["error"]) == ("planning", None)
    assert _calling(parts, leaving=leaving)("casebank.prune") is None, "a dry run is refused"

    def leave(_seconds: float) -> None:
        if list(statuses(runtime.database).values()).count("archived") == 2:
            raise prune.RunInterrupted

    applied = prune.advance(bank_of(parts, leave))
    assert applied is not None
    assert (applied["phase"], state.list_runs(runtime.database)[0]["error"]) == ("applying", None)
    assert _calling(parts)("casebank.advance")["removed_cases"] == 4
    assert set(statuses(runtime.database).values()) == {"archived"}


def test_notices_are_signed(runtime: Runtime, receiver: Receiver, tmp_path: Path) -> None:
    """A notice is signed like a callback, so that its receiver can verify the sender."""
    put(runtime.database, "bad", usage=20, rate=10)
    settings = runtime.settings.model_copy(update={"data_dir": tmp_path})
    parts = _with(replace(runtime, settings=settings), notify_url=receiver.url)
    full = prune.run(bank_of(parts))
    assert [json.loads(body)["event"] for _, _, body in receiver.received] == ["casebank.plan", "casebank.outcome"]
    for _, headers, body in receiver.received:
        Webhook(parts.settings.webhook_keys()[0]).verify(body, headers)
        assert json.loads(body)["run_id"] == full["run_id"]
    receiver.status = 500
    bank = replace(bank_of(parts), pause=lambda _seconds: None)
    assert prune.run(bank)["phase"] == "withheld"
    assert receiver.url not in state.list_runs(runtime.database)[0]["error"], "the URL is a secret"


def test_reflection_rates_and_embeds_cases(runtime: Runtime) -> None:
    """Reflection rates cases even if the embedder is unavailable. A later reflection adds the missing vectors."""
    parts = replace(runtime, embedder=HashEmbedder(16))
    put(runtime.database, "a", query="how to do it")
    use(runtime.database, ["a"], UUID(int=1), succeeded=False, error="TOOL_ERROR")
    assert _calling(replace(runtime, embedder=_Away()))("casebank.reflect") == {"rated": 1, "flagged": ["a"]}
    vector = parts.embedder.embed(["how to do it"])[0]
    assert search(runtime.database, vector, "hash:16", 1) == []
    assert _calling(parts)("casebank.reflect") == {"rated": 1, "flagged": ["a"]}
    assert search(runtime.database, vector, "hash:16", 1)[0].case_id == "a"


def test_uses_are_counted_in_the_background(runtime: Runtime) -> None:
    """`casebank.count` counts each use once, however often it runs."""
    put(runtime.database, "a")
    use(runtime.database, ["a"], UUID(int=1))
    call = _calling(runtime)
    assert (call("casebank.count"), call("casebank.count")) == (1, 0)
    assert column(runtime.database, "SELECT usage_count FROM cases") == [1]
    assert active_entries({"casebank.count"}, runtime.settings)["count_uses"].cadence.next(NOW) == NOW + timedelta(
        minutes=1
    )


def test_suggestions_are_scheduled_if_the_setting_allows_them(runtime: Runtime) -> None:
    """Suggestions are scheduled only if the setting `suggestions` is true. A failed model call stores no suggestion."""

    class _Model:
        name = "ill"

        def respond(self, *_given: Any) -> Any:
            raise ProviderError("ill")

    put(runtime.database, "a")
    use(runtime.database, ["a"], UUID(int=1), succeeded=False)
    call = _calling(replace(runtime, models=lambda _: _Model()))
    call("casebank.reflect")
    assert call("casebank.suggest") == 0
    assert "suggestion" not in (read(runtime.database, "a")["review"] or {})
    wanted = runtime.settings.model_copy(update={"casebank": CasebankSettings(suggestions=True)})
    names = {"casebank.suggest", "casebank.prune"}
    assert set(active_entries(names, runtime.settings)) == {"prune"}
    assert set(active_entries(names, wanted)) == {"prune", "suggest"}


def test_the_schedule_prunes_on_sundays(runtime: Runtime) -> None:
    """The schedule runs `casebank.prune` on Sundays at 02:00 with `dry_run=False`, and `casebank.reflect` daily."""
    found = active_entries({"casebank.prune", "casebank.reflect", "casebank.advance"}, runtime.settings)
    prunes = found["prune"]
    assert (prunes.arguments, prunes.queue) == ({"dry_run": False}, "maintenance")
    slot = prunes.cadence.previous(runtime.clock.now())
    assert (slot.weekday(), slot.hour, slot.minute) == (6, 2, 0)
    before = found["reflect"].cadence.previous(runtime.clock.now())
    assert found["reflect"].cadence.next(before) - before == timedelta(days=1)
    assert found["advance"].task == "casebank.advance"
