"""`certify` kills real workers, and finds each planted lie and nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from perdure.certify.certificate import Certificate, Kind
from perdure.certify.run import certify
from perdure.certify.schedules import Schedule
from perdure.turns.calls.execute import CallExecutor
from tests.repository.source import ROOT, read

pytestmark = pytest.mark.usefixtures("liars")


@pytest.fixture
def liars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the effects of `tests.certify.liars`."""
    monkeypatch.setenv("LIARS", str(tmp_path))
    return tmp_path


def _at(*places: str, flush: bool | None = None) -> Callable[[Schedule], bool]:
    """Whether a schedule has one of the places: a full enumeration takes minutes."""

    def chosen(schedule: Schedule) -> bool:
        return flush in {None, schedule.flush} and str(schedule.place).endswith(places)

    return chosen


def _kinds(certificate: Certificate) -> dict[str, list[Kind]]:
    return {
        each.tool: [found.kind for found in certificate.findings_of(each.agent, each.tool)]
        for each in certificate.tools
    }


@pytest.mark.long
def test_a_repeated_effect_is_found_with_its_shortest_schedule(liars: Path) -> None:
    """A worker is killed after the effect; the other one repeats the call, as the declaration allows."""
    found = certify("tests.certify.liars", tools=["order"], choose=_at("order.acted-1", flush=False))
    (finding,) = found.findings
    assert (finding.tool, finding.kind) == ("order", Kind.NOT_IDEMPOTENT)
    assert "killed just after order returned, the other worker continues" in finding.schedule
    assert finding.seen == f"the file {liars / 'orders'}"
    assert found.played == {"schedules": 2, "kills": 1, "flushes": 0}
    assert found.to_dict()["tools"][0] | {"notes": []} == {
        "agent": "liar", "tool": "order", "effect": "idempotent",
        "calls": 2, "ran": 3, "repeated": 1, "unknown": 0, "notes": [],
    }  # fmt: skip


@pytest.mark.exhaustive
def test_each_planted_lie_is_found() -> None:
    """A pure tool that writes is found without a kill. Each probe is asked after the kill that shows its lie."""
    wanted = ("look_up", "pay", "send")
    found = certify("tests.certify.liars", tools=wanted, choose=_at("pay.acted-1", "after-turns.step-1"))
    assert _kinds(found) == {
        "look_up": [Kind.NOT_PURE],
        "pay": [Kind.PROBE_DENIES],
        "send": [Kind.PROBE_CLAIMS],
    }
    pure = next(each for each in found.findings if each.kind is Kind.NOT_PURE)
    assert pure.schedule == 'liar calls look_up({"article": "text"})'


@pytest.mark.exhaustive
def test_honest_tools_pass_with_a_flush_of_redis() -> None:
    """A booking is repeated without a second effect; an unsafe call is probed, or its outcome is unknown."""
    found = certify(
        "tests.certify.liars",
        tools=["price", "book", "mail", "ship"],
        choose=_at("entered-1", "acted-1", "model-1", flush=True),
        lanes=2,
    )
    assert found, str(found)
    assert found.played["flushes"] == found.played["kills"] >= 12
    told = {each.tool: (each.repeated > 0, each.unknown > 0) for each in found.tools}
    assert told == {"price": (True, False), "book": (True, False), "mail": (False, True), "ship": (False, False)}


@pytest.mark.exhaustive
def test_a_fault_of_perdure_is_told_from_those_of_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of this module repeats unsafe calls. `certify` imports the module in this process, too."""
    monkeypatch.setattr(CallExecutor, "decide", CallExecutor.decide)  # so that the fault is taken out again
    found = certify("tests.certify.broken_engine", tools=["mail"], choose=_at("mail.acted-1", flush=False))
    assert _kinds(found) == {"mail": [Kind.PERDURE]}


EXAMPLES = [("examples/evaluation", "triage"), ("", "perdure.builtin"), ("", "perdure.cli.demo.shop")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("directory", "module"), EXAMPLES)
def test_nothing_is_found_in_what_is_shipped(directory: str, module: str, tmp_path: Path) -> None:
    """The kill is the one after which a call is repeated."""
    code = (
        "import sys; from perdure.certify.run import certify; "
        f"found = certify({module!r}, choose=lambda each: not each.flush and each.place.name.endswith('.acted')); "
        "print(found); sys.exit(not found)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / directory}:{ROOT}", "DEMO_ORDERS": str(tmp_path / "orders")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_the_example_of_the_document_is_found(tmp_path: Path) -> None:
    """The files of docs/certify.md, saved under the names in their first lines."""
    for block in re.findall(r"^```python\n(.*?)^```$", read("docs/certify.md"), re.MULTILINE | re.DOTALL):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    code = (
        "from perdure.testing import certify; "
        "found = certify('certify_shop', choose=lambda each: not each.flush and each.place.name == 'order.acted'); "
        "print(found)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] in read("docs/certify.md")
    assert 'the world: + {"article": "text", "pieces": 1}' in done.stdout


def _until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` is true: a server starts, or has ended."""
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _of(directory: Path) -> list[str]:
    """The processes that use the directory."""
    found = []
    for each in psutil.process_iter(["cmdline", "cwd"]):
        where = [*(each.info["cmdline"] or ()), each.info["cwd"] or ""]
        if any(str(directory) in text for text in where) and each.status() != psutil.STATUS_ZOMBIE:
            found.append(" ".join(where))
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "way"),
    [
        pytest.param(signal.SIGTERM, "command", id="SIGTERM"),
        pytest.param(signal.SIGHUP, "plugin", id="SIGHUP of pytest"),
        pytest.param(signal.SIGINT, "command", id="SIGINT", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, "plugin", id="SIGTERM of pytest", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_leaves_nothing_behind(liars: Path, number: signal.Signals, way: str) -> None:
    """The servers, the workers and their directory are gone when the command ends, and when pytest does."""
    command = {
        "command": ["-m", "perdure.cli", "certify", "tests.certify.liars", "--tool", "order", "--lanes", "2", "--json"],
        "plugin": ["-m", "pytest", "-p", "perdure.certify.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist",
                   "-p", "no:schemathesis", "--perdure-certify", "tests.certify.liars", str(liars)],
    }[way]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp") as name:  # a socket's path is short
        directory = Path(name)
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": name, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                _until(lambda: any(liars.iterdir()) or process.poll() is not None, "no tool has run")
            finally:
                process.send_signal(number)
            out, errors = process.communicate(timeout=60)
        assert process.returncode == {"command": 1, "plugin": 2}[way], out + errors
        assert list(directory.glob("perdure-*")) == []
        assert _of(directory) == []
    if way == "command":
        found = json.loads(out)
        assert (found["ok"], found["complete"], [each["tool"] for each in found["tools"]]) == (False, False, ["order"])
