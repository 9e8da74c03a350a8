"""The dashboard and the alert rules name series that exist, and none of celery-exporter's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.observe.series import ALERTS, DASHBOARD, named, promtool
from tests.repository.source import read


def test_the_names_are_perdures_own() -> None:
    """No name clashes with those of celery-exporter, which begin with `celery_`."""
    names = named()

    assert len(names) > 40
    assert [name for name in names if not name.startswith("perdure_")] == []


def test_the_files_have_what_their_readers_require() -> None:
    """Each alert has an expression, a severity and a summary. Each panel has a title, a place and a query."""
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    panels = json.loads(DASHBOARD.read_text())["panels"]

    assert all(rule["alert"] and rule["expr"] and rule["labels"]["severity"] for rule in rules)
    assert all(rule["annotations"]["summary"].endswith(".") for rule in rules)
    assert len({rule["alert"] for rule in rules}) == len(rules)
    assert all(panel["title"] and panel["targets"] for panel in panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_prometheus_accepts_the_rules() -> None:
    """Each expression parses, and each template of an annotation names what exists."""
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))


def test_the_table_of_faults_names_alerts_with_their_series() -> None:
    """Each row of the documents' table of twelve faults has an alert over its series, and a test of its own."""
    rules = {
        rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    }
    table = read("docs/operating.md").partition("### Faults")[2].partition("### Metrics")[0]
    rows = re.findall(r"^\| (?:[^|]+) \| `(\w+)`(?:, down)? \| `(\w+)` \| `(\w+)` \|", table, re.MULTILINE)
    planted = re.findall(r'stack\.shows\("(\w+)", "\w+", "(\w+)"\)', read("tests/processes/test_faults.py"))

    assert len(rows) == 12
    assert [alert for _, alert, series in rows if series not in rules[alert]] == []
    assert planted == [(part, alert) for part, alert, _ in rows]


RULE_TEST = """
rule_files: [{rules}]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
{series}
    alert_rule_test:
      - {{eval_time: {at}, alertname: {alert}, exp_alerts: [{fires}]}}
"""

OUTAGE = {
    "perdure_database_up": "1x4 0x20 1x20",
    "perdure_workers_of_turns": "1x4 _x20 1x20",
    "perdure_beats": "1x4 _x20 1x20",
    'perdure_processes_lost{kind="worker"}': "0x4 _x20 2 0x20",
    "perdure_broker_up": "1x45",
}
"""What a gateway serves before, during and after five minutes without PostgreSQL. Workers report soon afterwards."""


def _duty(failed: str, succeeded: str) -> dict[str, str]:
    return {
        f'perdure_duty_runs_total{{duty="files",outcome="{outcome}"}}': values
        for outcome, values in (("failed", failed), ("succeeded", succeeded))
    }


_SLOWLY = _duty("0x40 1x40 2x80 3x160 4x240", "0x600")
"""A duty of every ten minutes fails from the start: its pause doubles, up to an hour."""


@pytest.mark.parametrize(
    ("alert", "series", "at", "fires"),
    [
        ("PerdureDatabaseDown", OUTAGE, "4m", True),
        ("PerdureNoWorker", OUTAGE, "4m", False),
        ("PerdureBeatGone", OUTAGE, "6m", False),
        ("PerdureProcessLost", OUTAGE, "6m30s", False),
        ("PerdureBrokerDown", OUTAGE, "6m", False),
        ("PerdureNoWorker", {"perdure_workers_of_turns": "0x20"}, "3m", True),
        ("PerdureProcessLost", {'perdure_processes_lost{kind="worker"}': "0x4 1x20"}, "4m", True),
        ("PerdureBrokerDown", {"perdure_broker_up": "1x4 0x20"}, "3m", True),
        ("PerdureDutyFails", _duty("0x4 1x4 2x4 3x4 4x40", "9x60"), "6m", True),
        ("PerdureDutyFails", _SLOWLY, "50m", True),
        ("PerdureDutyFails", _SLOWLY, "140m", True),
        ("PerdureDutyFails", _duty("0x40 1x600", "1x80 2x40 3x40 4x400"), "25m", False),
        ("PerdureDutyFails", _duty("0x600", "1x600"), "100m", False),
    ],
)
def test_an_alert_fires_for_its_own_fault_only(
    tmp_path: Path, alert: str, series: dict[str, str], at: str, *, fires: bool
) -> None:
    """An outage of PostgreSQL is one alert: it says nothing about workers and beats, which cannot report."""
    rules = {each["alert"]: each for group in yaml.safe_load(ALERTS.read_text())["groups"] for each in group["rules"]}
    named = {"PerdureProcessLost": {"kind": "worker"}, "PerdureDutyFails": {"duty": "files"}}.get(alert, {})
    labels, summary = {**rules[alert]["labels"], **named}, rules[alert]["annotations"]["summary"]
    for label, value in named.items():
        summary = summary.replace(f"{{{{ $labels.{label} }}}}", value)
    expected = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
    lines = "\n".join(f"      - {json.dumps({'series': name, 'values': values})}" for name, values in series.items())
    text = RULE_TEST.format(rules=ALERTS, series=lines, at=at, alert=alert, fires=json.dumps(expected) if fires else "")
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    assert "SUCCESS" in promtool("test", "rules", str(file))
