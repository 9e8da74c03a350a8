"""`perdure certify` prints a line for each tool, what is left out, and each finding."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import typer

from perdure.certify import run
from perdure.certify.certificate import Certificate, Finding, Kind, ToolReport
from perdure.cli.inspect import certify
from tests.cli.conftest import Environment, Perdure

MODULE = """
from perdure import Agent, celery_tool

shop = Agent("shop", "You sell.", [celery_tool("shop.order", effect="idempotent", timeout_s=9)])
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module whose only tool waits for a Celery task, so that no server is started."""
    (tmp_path / "agents_of_a_shop.py").write_text(MODULE, encoding="utf-8")
    return "agents_of_a_shop"


def test_a_module_without_tools_of_its_own(nowhere: Environment, perdure: Perdure, module: str) -> None:
    """What is left out is said, with the reason."""
    done = perdure("certify", module, env=nowhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "shop_order of shop is left out: waits for a Celery task."
    found = json.loads(perdure("certify", module, "--json", env=nowhere).stdout)
    assert (found["ok"], found["tools"], len(found["left_out"])) == (True, [], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no_such_module",), "the module is 'no_such_module': No module named"),
        (("agents_of_a_shop", "--tool", "sing"), "there is no tool 'sing'"),
    ],
)
def test_a_wrong_module_or_tool_is_wrong_usage(
    nowhere: Environment, perdure: Perdure, module: str, arguments: tuple[str, ...], message: str
) -> None:
    done = perdure("certify", *arguments, env=nowhere)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_what_was_found_before_a_signal_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 1, also if nothing was found so far."""
    report = ToolReport("shop", "order", "idempotent", calls=2, ran=2)
    partial = Certificate("shop", [report], played=Counter({"schedules": 2, "kills": 1}), complete=False)

    def interrupted(*_given: object, **_more: object) -> Certificate:
        raise run.CertificationInterrupted(partial)

    monkeypatch.setattr(run, "certify", interrupted)
    with pytest.raises(typer.Exit) as ended:
        certify.certify("shop")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.splitlines() == [
        "order\tshop\tidempotent\t2\t2\t0\t0\tnothing found",
        "",
        "Stopped before the end.",
        "2 schedules with 1 kills and 0 flushes of Redis: nothing found so far.",
    ]
    with pytest.raises(typer.Exit):
        certify.certify("shop", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["complete"]) == (False, False)


def test_the_output_of_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each tool with its counts, the notes, and then each finding with its schedule."""
    report = ToolReport("shop", "order", "idempotent", calls=21, ran=25, repeated=4, notes=["fails: No ink"])
    seen = "the file /tmp/orders"
    finding = Finding("shop", "order", Kind.NOT_IDEMPOTENT, "it is no such tool.", "a kill", seen, schedules=4)
    played = Counter({"schedules": 21, "kills": 20, "flushes": 10})
    certify._write(Certificate("shop", [report], [finding], {("shop", "mail"): "waits for a client"}, played))
    assert capsys.readouterr().out.splitlines() == [
        "order\tshop\tidempotent\t21\t25\t4\t0\tnot idempotent",
        "order of shop: fails: No ink.",
        "mail of shop is left out: waits for a client.",
        "",
        "order of shop: it is no such tool.",
        "  schedule: a kill",
        "  seen:     the file /tmp/orders",
        "  in:       4 schedules",
        "",
        "21 schedules with 20 kills and 10 flushes of Redis: 1 found.",
    ]
