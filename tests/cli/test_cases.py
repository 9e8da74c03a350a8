"""`perdure cases`, run in the test's process unless a test needs a separate one."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx2
import pytest

from perdure.casebank.runs import state
from perdure.cli.errors import Failure
from perdure.database.engine import Database
from perdure.errors import NotFound
from perdure.runtime import Runtime
from perdure.settings import CasebankSettings, PruneApproval
from tests.casebank.bank import put, statuses
from tests.cli.conftest import Environment, Perdure
from tests.cli.test_memory import Command, command
from tests.processes.gateway import serving
from tests.turns.harness import until

__all__ = ["command"]

LINES: list[dict[str, Any]] = [
    {"case_id": "a", "query": "reset the router", "response_text": "hold it", "usage_count": 20, "success_rate": 10},
    {"case_id": "b", "query": "boil an egg", "response_text": "six minutes", "usage_count": 2, "success_rate": None},
    {"case_id": "b", "query": "boil another egg", "response_text": "nine minutes"},
    {"case_id": "c", "query": "", "response_text": "nothing"},
]
_PATIENCE_S = 60.0
_RUN_LIMITS = CasebankSettings(load_percent=100, recent_access_days=1, approval=PruneApproval.MANUAL)


@pytest.fixture
def runtime(runtime: Runtime) -> Runtime:
    """A runtime in which an operator must approve each pruning run."""
    return replace(runtime, settings=runtime.settings.model_copy(update={"casebank": _RUN_LIMITS}))


def _json(command: Command, *arguments: str) -> Any:
    result = command("cases", *arguments, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return json.loads(result.stdout)


def test_a_file_is_imported_found_and_exported(command: Command, tmp_path: Path) -> None:
    """An import reports bad lines and imports the others. Importing the export changes nothing."""
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    result = command("cases", "import", str(file), "--json")
    assert isinstance(result.exception, Failure)
    done = json.loads(result.stdout)
    assert (done["added"], done["unchanged"], done["refused"]) == (2, 1, 1)
    assert done["bad"][0]["line"] == 4
    assert "line 4: query" in result.stderr
    [found] = _json(command, "search", "how to boil an egg", "-k", "1")["results"]
    assert found["case_id"] == "b"
    assert command("cases", "export", str(out)).exit_code == 0
    assert [json.loads(line)["case_id"] for line in out.read_text().splitlines()] == ["a", "b"]
    assert _json(command, "import", str(out)) == {"added": 0, "unchanged": 2, "refused": 0, "bad": []}
    assert out.read_text() == command("cases", "export").stdout


def test_cases_are_listed_and_shown(command: Command, runtime: Runtime) -> None:
    """Cases are listed by id; one case is shown with its history."""
    for case_id in ("a", "b", "c"):
        put(runtime.database, case_id)
    assert [each["case_id"] for each in _json(command, "list", "--after", "a", "--limit", "1")] == ["b"]
    assert _json(command, "list", "--archived") == _json(command, "list", "--flagged") == []
    assert _json(command, "show", "a")["status"] == "active"
    assert "usage_count" in command("cases", "show", "a").stdout
    assert isinstance(command("cases", "show", "nobody").exception, NotFound)


def test_a_case_is_shared_and_unshared(command: Command, tmp_path: Path) -> None:
    """Other users find a shared case, and exports mark it. The case's history names who shared and unshared it."""
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(LINES[1] | {"user_id": "ana", "bank": "common"}) + "\n")
    assert command("cases", "import", str(file)).exit_code == 0

    def found() -> list[str]:
        return [each["case_id"] for each in _json(command, "search", "boil an egg", "--user", "bob")["results"]]

    assert found() == []
    shared = _json(command, "share", "b")
    assert found() == ["b"]
    [line] = command("cases", "export").stdout.splitlines()
    assert json.loads(line)["shared_at"] == shared["shared_at"]
    assert "bank" not in json.loads(line)
    assert _json(command, "unshare", "b") == {"case_id": "b", "shared_at": None}
    assert found() == []
    events = [(each["event"], each["details"]) for each in _json(command, "show", "b")["history"]]
    assert events[1:] == [("shared", {"by": "the command line"}), ("unshared", {"by": "the command line"})]
    assert isinstance(command("cases", "share", "nobody").exception, NotFound)
    assert _json(command, "list", "--bank", "support") == []
    assert command("cases", "export", "--bank", "support").stdout == ""
    assert command("cases", "search", "egg", "--user", "bob", "--include-archived").exit_code != 0


def test_a_plan_is_shown_decided_applied_and_undone(command: Command, runtime: Runtime) -> None:
    """Without `--apply`, `cases prune` changes nothing.

    The report of a pruning run shows the reasons, the texts of the merged cases and the outcome.
    """
    put(runtime.database, "low", usage=20, rate=10)
    put(runtime.database, "one", query="how to do it", vector=[1.0, 0.0], usage=9)
    put(runtime.database, "two", query="how do I do it", vector=[1.0, 0.0], usage=3)
    assert _json(command, "prune")["dry_run"] is True
    assert "merged\ttwo\tinto one\t1.0000" in command("cases", "prune").stdout
    assert _json(command, "runs") == []
    made = _json(command, "prune", "--apply")
    assert (made["phase"], set(statuses(runtime.database).values())) == ("waiting_approval", {"active"})
    assert _json(command, "reject", made["run_id"])["phase"] == "rejected"
    made = _json(command, "prune", "--apply")
    assert _json(command, "approve", made["run_id"])["phase"] == "done"
    assert statuses(runtime.database) == {"low": "archived", "one": "active", "two": "archived"}
    assert [each["phase"] for each in _json(command, "runs")] == ["done", "rejected"]
    assert _json(command, "runs", "show", made["run_id"])["outcome"]["merged_cases"] == 1
    report = command("cases", "runs", "show", made["run_id"]).stdout
    assert "1 removed, 1 merged, 0 archived, 0 spared" in report
    assert "1. low: succeeds in 10 % of 20 uses, under 30 %" in report
    [pair] = [line for line in report.splitlines() if line.split()[:1] == ["asked"]]
    assert " ".join(pair.split()) == "asked how do I do it how to do it", (
        "a pair is on one line, the keeper on the right"
    )
    assert "1.0000" in report
    assert "low:" not in command("cases", "runs", "show", made["run_id"], "--only", "merge").stdout
    assert _json(command, "restore", "low") == {"case_id": "low", "status": "restored"}
    assert isinstance(command("cases", "restore", "low").exception, NotFound)
    assert _json(command, "reflect") == {"rated": 0, "flagged": []}


def test_the_command_runs_as_a_process(perdure: Perdure) -> None:
    """The command works in a separate process. With `--json`, it prints only JSON on stdout."""
    done = perdure("cases", "prune", "--json")
    assert (done.returncode, json.loads(done.stdout)["removed_cases"]) == (0, 0)
    wrong = perdure("cases", "runs", "show", "it")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "UUID" in wrong.stderr


@pytest.mark.exhaustive
def test_the_progress_bar_moves(perdure: Perdure, environment: Environment, database: Database, tmp_path: Path) -> None:
    """If stderr is a terminal, `cases prune` shows a progress bar while it applies a plan."""
    for number in range(40):
        put(database, f"low {number:02}", usage=20, rate=10)
    slow = {"PERDURE_CASEBANK__LOAD_PERCENT": "8", "PERDURE_CASEBANK__DUPLICATE_BATCH": "2", "TERM": "xterm"}
    master, slave = pty.openpty()
    out = tmp_path / "stdout"
    out.touch()
    process = perdure.start(
        "cases", "prune", "--apply", "--json",
        env={**environment, **slow}, stdin=Path(os.devnull), stdout=out, stderr=Path(os.ttyname(slave)),
    )  # fmt: skip
    shown, deadline = "", time.monotonic() + _PATIENCE_S
    try:
        while process.is_alive() or select.select([master], [], [], 0)[0]:
            assert time.monotonic() < deadline, shown
            if select.select([master], [], [], 0.1)[0]:
                shown += os.read(master, 65_536).decode(errors="replace")
    finally:
        process.kill()
        process.join()
        os.close(slave)
        os.close(master)
    assert json.loads(out.read_text())["removed_cases"] == 40
    percents = {int(each) for each in re.findall(r"applying[^%\r\n]*?(\d+)%", re.sub(r"\x1b\[[0-9;]*m", "", shown))}
    assert len({each for each in percents if 0 < each < 100}) >= 3, percents


@pytest.mark.long
def test_a_run_outlives_the_gateway_that_requested_it(perdure: Perdure, database: Database) -> None:
    """A gateway accepts a pruning run and ends. A worker that starts later executes the run."""
    put(database, "low", usage=20, rate=10)
    with serving(perdure) as url:
        begun = httpx2.post(f"{url}/v1/consolidation/run?wait=0.2", timeout=_PATIENCE_S)
        assert (begun.status_code, begun.json()["phase"]) == (202, "planning")
    worker = perdure.start("worker", "--concurrency", "2")
    try:
        run_id = UUID(begun.json()["run_id"])
        until(lambda: state.at_rest(database, run_id), "the run is finished")
        assert state.read_run(database, run_id)["outcome"]["removed_cases"] == 1
        with serving(perdure) as url:
            dry = httpx2.post(f"{url}/v1/consolidation/dry-run", timeout=_PATIENCE_S)
            assert (dry.status_code, dry.json()["dry_run"], dry.json()["removed_cases"]) == (200, True, 0)
    finally:
        worker.terminate()
        worker.join(_PATIENCE_S)
        worker.kill()
        worker.join()
