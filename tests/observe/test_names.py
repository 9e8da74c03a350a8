"""The dashboard and the alert rules name series that exist, and none of celery-exporter's."""

from __future__ import annotations

import json

import yaml

from tests.observe.series import ALERTS, DASHBOARD, named


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
