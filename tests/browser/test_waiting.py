"""The web chat while a turn waits: a question to the user, and the progress of a tool."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from tests.browser.conftest import Page
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

AGENTS = "tests.browser.asking_agents"


@pytest.fixture
def waiting_agent(installation: Installation) -> None:
    """A worker and, later, a gateway with the agent of this test."""
    installation.environment["PERDURE_AGENTS"] = AGENTS
    installation.worker().ready()


@pytest.mark.browser
def test_a_question_and_progress_are_shown(
    waiting_agent: None, installation: Installation, page: Page, tmp_path: Path
) -> None:
    """The user answers a question by writing, the second time in a way that fits."""
    page.say("coffee: please")
    page.until(lambda: page.texts() == ["coffee: please", "Which size, for coffee: please?"], "the question")
    page.until(lambda: page.texts("#status") == ["Waits for your answer"], "the status")
    page.say("XXL")
    page.until(lambda: len(page.all(".question")) == 2, "the question, asked again")
    page.picture(tmp_path / "question.png")
    page.driver.refresh()
    page.until(lambda: len(page.all(".question")) == 2, "the open question again")
    assert page.texts()[:2] == ["coffee: please", "Which size, for coffee: please?"]
    page.say("m")
    answer = answer_to("coffee: please", "M")
    page.until(lambda: page.texts()[-1] == answer, "the answer")
    assert page.texts()[-2:] == ["m", answer]
    page.picture(tmp_path / "answered.png")

    page.say("slow: work")
    page.until(lambda: page.texts("#status") == ["slow: 3 of 9"], "the progress")
    page.picture(tmp_path / "progress.png")
    page.until(lambda: page.texts()[-1].startswith("answer to 'slow: work'"), "the second answer")
    page.driver.refresh()
    page.until(lambda: "slow: work" in page.texts(), "the conversation again")
    assert page.texts()[:4] == ["coffee: please", "Which size, for coffee: please?", "M", answer]
    page.picture(tmp_path / "again.png")
    installation.check()


@pytest.mark.browser
def test_a_question_of_another_agent_is_answered_on_the_page(
    waiting_agent: None, installation: Installation, page: Page
) -> None:
    """It looks like a question of the agent that the user writes to, also when the page is loaded again."""
    page.say(text := "breakfast: please")
    question = f"Which size, for coffee: {text}?"
    page.until(lambda: page.texts() == [text, question], "the question")
    page.until(lambda: page.texts("#status") == ["Waits for your answer"], "the status")
    page.driver.refresh()
    page.until(lambda: page.texts() == [text, question], "the open question again")
    page.say("m")
    answer = answer_to(text, answer_to(f"coffee: {text}", "M"))
    page.until(lambda: page.texts()[-1] == answer, "the answer")
    installation.check()


@pytest.mark.browser
def test_a_question_of_the_terminal_is_answered_on_the_page(
    waiting_agent: None, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """A turn that the terminal began waits for an answer over its own channel: the page sends it over that one."""
    body = {"user_id": "local", "channel": "cli", "text": "coffee: now"}
    assert httpx2.post(f"{gateway.url}/v1/messages", json=body).status_code == 202
    page.press("Default conversation")
    page.until(lambda: page.texts("#status") == ["Waits for your answer"], "the question")
    page.say("s")
    answer = answer_to("coffee: now", "S")
    page.until(lambda: page.texts() == ["coffee: now", "Which size, for coffee: now?", "s", answer], "the answer")
    page.see(".rate")  # the turn is settled
    assert page.all(".queued") == []
    installation.check()
