"""Each name that authors import has an example in its docstring, and the example gives the printed results."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from fastapi import FastAPI
from sqlalchemy import NullPool, create_engine
from sqlalchemy.ext.asyncio import create_async_engine

import perdure
import perdure.testing
from perdure.application import process
from perdure.turns.inbox import route_unrouted
from tests.turns.harness import Harness
from tests.turns.scripted import says

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (perdure, perdure.testing)
    for name in module.__all__
}


def names_of(module: Any) -> dict[str, Any]:
    """What `from module import *` imports."""
    return {name: getattr(module, name) for name in module.__all__}


def example_of(name: str) -> doctest.DocTest | None:
    """The example in the docstring of a public name; for an instance, such as `sleep_until`, that of its class."""
    named = PUBLIC[name]
    documented = named if hasattr(named, "__module__") and callable(named) else type(named)
    source = sys.modules[documented.__module__]
    found = doctest.DocTestFinder(recurse=False, exclude_empty=False).find(documented, name, source, globs={})
    return found[0] if found[0].examples else None


@pytest.fixture
def engines(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The application's engines. After each commit, a worker answers the message."""

    def work(*_: Any) -> None:
        route_unrouted.route_due(harness.runtime)
        for row in harness.sql("SELECT session_id FROM sessions"):
            harness.run(row.session_id)

    url = harness.database.url
    monkeypatch.setenv("PERDURE_DATABASE_URL", url.render_as_string(hide_password=False))
    monkeypatch.setattr(process, "_parts", {})
    monkeypatch.setattr(process.Parts, "wake", work)
    harness.script(says("Good day."))
    engine = create_engine(url)
    yield {
        "engine": engine,
        "async_engine": create_async_engine(url.set(drivername="postgresql+asyncpg"), poolclass=NullPool),
    }
    engine.dispose()
    for each in process._parts.values():
        with each._changed:
            each._later.clear()  # a wake-up after the test would connect to a broker
        if each._publishing is not None:
            each._publishing.close()
        each.database.close()
        each.watch.close()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An author copies the example, so it must exist and give what it prints."""
    monkeypatch.chdir(Path(__file__).parent)  # the example of `recorded` reads a file
    found = example_of(name)
    assert found is not None, f"the docstring of {name} has no example"
    uses_database = any("engine" in each.source for each in found.examples)
    own = {"timedelta": timedelta, "Celery": Celery, "FastAPI": FastAPI, "__name__": "example"}
    found.globs = {**names_of(perdure), **names_of(perdure.testing), **own}
    if uses_database:
        found.globs |= request.getfixturevalue("engines")
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert runner.run(found, out=printed.append).failed == 0, "".join(printed)
