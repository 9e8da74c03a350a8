"""The series that the dashboard and the alert rules name."""

from __future__ import annotations

import json
import re
import subprocess

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.programs import program
from tests.repository.source import ROOT

DASHBOARD, ALERTS = ROOT / "deploy" / "grafana-dashboard.json", ROOT / "deploy" / "alerts.yaml"

_SERIES = re.compile(r"\b(?:perdure|celery|process)_\w+")


def named() -> set[str]:
    """The names of all series in the expressions."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]] + [each["expr"] for each in rules]
    return {name for expression in expressions for name in _SERIES.findall(expression)}


def with_data(*texts: str) -> set[str]:
    """The names of all series of the texts of metrics, which must parse."""
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    return {sample.name for family in families for sample in family.samples}


def promtool(*arguments: str, text: str = "") -> str:
    """Run Prometheus's own checker, which must accept what it is given; returns what it prints."""
    ran = subprocess.run(
        [program("promtool"), *arguments], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    assert (ran.returncode, ran.stderr) == (0, ""), f"{ran.stdout}{ran.stderr}"
    return ran.stdout
