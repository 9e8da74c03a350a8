"""The example researcher, in unit tests as its author would write them."""

from __future__ import annotations

import base64
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perdure.testing import Scripted, ask, call
from tests.files.contents import pdf

RESEARCHER = Path(__file__).parents[2] / "examples" / "researcher" / "researcher.py"


@pytest.fixture
def research(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, imported anew."""
    spec = importlib.util.spec_from_file_location("researcher", RESEARCHER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "researcher", module)
    spec.loader.exec_module(module)
    return module


def _reads(task: str) -> Any:
    return call("read_page", task=task)


def test_a_report_of_two_readers(research: ModuleType) -> None:
    """Both readers answer in their form; the report is data, and counts what the readers used."""
    found = research.Found(summary="It is poisonous.", quotes=["toxic to cats"])
    report = research.Report(answer="No.", confidence="high", sources=[{"page": "a", "quote": "toxic to cats"}])
    model = Scripted([_reads("a: is it toxic?"), _reads("b: is it toxic?")], report)
    answer = ask(
        research.researcher, "Is this lily safe?", model=model, models={"reader": Scripted(found, found)},
        agents=[research.reader],
    )  # fmt: skip
    assert answer.data == report
    assert ["toxic to cats" in (each.result or "") for each in answer.calls] == [True, True]


def test_a_file_of_the_user_reaches_the_model(research: ModuleType) -> None:
    """The model reads the file with the question, under the agent's settings."""
    report = research.Report(answer="No.", confidence="high", sources=[{"page": "lily.pdf", "quote": "toxic"}])
    model = Scripted(report, reads={"application/pdf"})
    file = {"type": "file", "data": base64.b64encode(pdf()).decode(), "name": "lily.pdf"}
    parts = [{"type": "text", "text": "Is it safe?"}, file]
    answer = ask(research.researcher, model=model, agents=[research.reader], parts=parts)
    assert answer.data == report
    assert [each.media_type for each in model.requests[0].messages[-1].files] == ["application/pdf"]
    assert model.requests[0].settings["max_tokens"] == 4_000


def test_a_report_without_sources_is_written_again(research: ModuleType) -> None:
    sure = research.Report(answer="No.", confidence="high", sources=[])
    unsure = research.Report(answer="Perhaps.", confidence="low", sources=[])
    model = Scripted(sure, unsure)
    answer = ask(research.researcher, "Is it?", model=model, agents=[research.reader])
    assert (answer.data, len(model.requests)) == (unsure, 2)
    assert "Name your sources" in model.requests[1].messages[-1].content
