"""The page "What I know about you": memories are seen, corrected and forgotten, and conversations are left out."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from selenium.webdriver.common.keys import Keys

from perdure.access.tenants import UserKey
from perdure.memory.consolidation.extraction import PROMPT
from perdure.memory.recall.agent_memory import forget
from tests.browser.conftest import Page
from tests.memory.remembering import add_memory
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to, memory_of

LYON, BOAT, CASTLE, CAVE = "I live in Lyon.", "I own a boat.", "I own a secret castle.", "I own a lost cave."
LOCAL = UserKey("local")


@pytest.fixture
def remembering_worker(installation: Installation) -> None:
    """A worker that consolidates each session, however short."""
    installation.environment["PERDURE_CONSOLIDATION__MIN_TURNS"] = "1"
    installation.worker().ready()


def _say(page: Page, text: str) -> None:
    page.say(text)
    page.until(lambda: page.texts()[-2:] == [text, answer_to(text)], "the answer")
    page.see(".rate")


def _end(page: Page, installation: Installation) -> None:
    """End the open conversation's session, and wait until it is consolidated."""
    page.find("#menu summary").click()
    page.press("End this session")
    waiting = "SELECT FROM sessions WHERE consolidated_at IS NULL"
    page.until(lambda: not installation.query(waiting), "the consolidation")


def _known(page: Page) -> list[str]:
    return page.texts("#memory-list > li:not(.ended) .content")


def _open(page: Page) -> None:
    page.until(lambda: page.find("#known").is_enabled(), "an open conversation")
    page.find("#known").click()
    page.until(lambda: page.texts("#memory-status") == [""], "the memories")


def _close(page: Page) -> None:
    page.find("#close-memories").click()
    assert not page.find("#memories").is_displayed()


def _extracted(installation: Installation) -> str:
    """All that the model was given to extract memories from."""
    requests = [each["messages"] for each in installation.model_server.server.requests]
    return "\n".join(str(each[1:]) for each in requests if each[0]["content"] == PROMPT)


@pytest.mark.browser
def test_a_memory_is_corrected_and_forgotten(
    remembering_worker: None, installation: Installation, gateway: GatewayProcess, page: Page, tmp_path: Path
) -> None:
    """The user reads where a memory comes from, corrects it, and forgets another one, all by keyboard.

    What was corrected stays as history. What was forgotten is gone after a reload, too.
    """
    _open(page)
    assert page.texts("#memory-list .none")
    page.picture(tmp_path / "empty.png")
    _close(page)
    for text in (BOAT, LYON):
        _say(page, text)
        _end(page, installation)
        page.press("New conversation")
        page.until(lambda: page.texts() == [], "an empty conversation")
    page.find("#known").send_keys(Keys.ENTER)
    page.until(lambda: _known(page) == [memory_of(LYON), memory_of(BOAT)], "both memories")
    page.find("#memory-list summary").send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#memory-list blockquote") == [LYON], "the source message")
    page.picture(tmp_path / "sources.png")

    focused = page.driver.switch_to
    page.find("#memory-list .actions button").send_keys(Keys.ENTER)
    assert focused.active_element.tag_name == "textarea"
    focused.active_element.send_keys("nonsense", Keys.ESCAPE)
    assert _known(page) == [memory_of(LYON), memory_of(BOAT)], "Escape leaves the form, not the page"
    focused.active_element.send_keys(Keys.ENTER)
    focused.active_element.send_keys(Keys.CONTROL, "a")
    focused.active_element.send_keys("I live in Nice.", Keys.TAB, Keys.TAB, Keys.ENTER)
    page.until(lambda: _known(page) == ["I live in Nice.", memory_of(BOAT)], "the correction")
    assert page.texts("#memory-list > .ended .content") == [memory_of(LYON)]
    page.picture(tmp_path / "corrected.png")

    page.find("#memory-list > li:last-child .actions button:last-child").send_keys(Keys.ENTER)
    assert focused.active_element.text == "Forget it"
    page.picture(tmp_path / "forget.png")
    focused.active_element.send_keys(Keys.ENTER)
    page.until(lambda: _known(page) == ["I live in Nice."], "forgotten")
    page.driver.refresh()
    page.see("#text")
    _open(page)
    page.until(lambda: _known(page) == ["I live in Nice."], "the same after a reload")
    focused.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.find("#memories").is_displayed(), "Escape closes the page")
    installation.check()


@pytest.mark.browser
def test_a_conversation_is_not_remembered(
    remembering_worker: None, installation: Installation, gateway: GatewayProcess, page: Page, tmp_path: Path
) -> None:
    """Remembering is paused before a conversation's first message, and in its middle: nothing is extracted from it."""
    page.until(lambda: page.texts("h1") == ["New conversation"], "a new conversation")
    _open(page)
    page.find("#remember").send_keys(Keys.SPACE)
    page.until(lambda: not page.find("#remember").is_selected(), "paused")
    page.picture(tmp_path / "paused.png")
    _close(page)
    page.see("#paused")
    _say(page, CASTLE)
    page.driver.refresh()
    page.see("#paused")
    _end(page, installation)
    page.press("New conversation")
    page.until(lambda: page.texts() == [], "an empty conversation")
    assert not page.find("#paused").is_displayed()

    _say(page, CAVE)
    _open(page)
    page.find("#remember").click()
    page.until(lambda: page.find("#paused").is_displayed() and page.find("#remember").is_enabled(), "paused")
    _close(page)
    _end(page, installation)
    page.press("New conversation")
    page.until(lambda: page.texts() == [], "an empty conversation")
    _say(page, BOAT)
    _end(page, installation)
    _open(page)
    page.until(lambda: _known(page) == [memory_of(BOAT)], "only the memory of the third conversation")
    assert BOAT in _extracted(installation)
    assert CASTLE not in _extracted(installation)
    assert CAVE not in _extracted(installation)
    installation.check()


@pytest.mark.browser
def test_many_memories_and_errors(
    remembering_worker: None, installation: Installation, gateway: GatewayProcess, page: Page, tmp_path: Path
) -> None:
    """A long list comes page by page, HTML in a memory is text, and errors are shown where they occur."""
    _say(page, "hello")
    hostile = "<img src=x onerror=\"document.title='bad'\"> is what the user wrote. " + "long" * 60
    for number in range(45):
        add_memory(installation.runtime, LOCAL, hostile if number == 44 else f"The user has read book {number}.")
    _open(page)
    page.until(lambda: len(_known(page)) == 20, "the first page")
    assert page.texts("#memory-list > li:first-child .content") == [hostile]
    for count in (40, 45):
        page.press("Show more")
        page.until(lambda count=count: len(_known(page)) == count, f"{count} memories")
    assert len(set(_known(page))) == 45
    assert not page.find("#more-memories").is_displayed()
    for theme in ("light", "dark"):
        page.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )
        for width, height in ((1280, 800), (400, 800)):
            page.size(width, height)
            page.picture(tmp_path / f"{theme}-{width}.png")
            wide = (
                "return Math.max(document.documentElement.scrollWidth, document.querySelector('#memories').scrollWidth)"
            )
            assert page.driver.execute_script(wide) <= width
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page.size(1280, 800)

    gateway.kill()
    page.find("#memory-list .actions button:last-child").send_keys(Keys.ENTER)
    page.find("#memory-list .danger").send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#memory-list form .bad") != [""], "the error")
    assert len(_known(page)) == 45
    _close(page)
    page.find("#known").click()
    page.until(lambda: "could not be read" in page.texts("#memory-status")[0], "the error of the list")
    page.picture(tmp_path / "error.png")
    gateway.start()
    page.press("Try again")
    page.until(lambda: len(_known(page)) == 20, "the list")
    installation.check()


@pytest.mark.browser
def test_the_list_follows_what_changes(
    remembering_worker: None, installation: Installation, gateway: GatewayProcess, page: Page, tmp_path: Path
) -> None:
    """A correction ends another memory, and is undone; the words of another memory are not listed twice.

    Another tab forgets memories: the list goes on, and what is gone may be forgotten here, too. What holds until a day
    to come is not over. Hebrew begins on the right.
    """
    _say(page, "hello")
    books = [add_memory(installation.runtime, LOCAL, f"The user has read book {number}.") for number in range(25)]
    for text in ("שלום, אני גר בחיפה.", LYON, "My sister lives in Rome."):
        add_memory(installation.runtime, LOCAL, text)
    installation.query(
        "INSERT INTO memory_sources SELECT memory_id, s.session_id, 1 FROM memories, sessions AS s "
        "WHERE content = %(text)s RETURNING 1",
        text=LYON,
    )
    _open(page)
    page.until(lambda: len(_known(page)) == 20, "the first page")
    direction = "return getComputedStyle(document.querySelector('#memory-list > li:nth-child(3) .content')).direction"
    assert page.driver.execute_script(direction) == "rtl"

    focused = page.driver.switch_to
    page.find("#memory-list .actions button").send_keys(Keys.ENTER)
    focused.active_element.send_keys(Keys.CONTROL, "a")
    focused.active_element.send_keys("I live in Nice.", Keys.TAB, Keys.TAB, Keys.ENTER)
    page.until(lambda: page.texts("#memory-status") == ["Corrected."], "the correction")
    assert page.texts("#memory-list > .ended .content") == ["My sister lives in Rome.", LYON]
    assert focused.active_element.get_attribute("aria-label") == "Correct: I live in Nice."
    focused.active_element.send_keys(Keys.TAB, Keys.ENTER, Keys.ENTER)
    page.until(lambda: page.texts("#memory-status") == ["Forgotten."], "forgotten")
    assert page.texts("#memory-list > .ended .content") == ["My sister lives in Rome."]
    assert LYON in _known(page)

    page.find("#memory-list > li:nth-child(4) .actions button").send_keys(Keys.ENTER)
    focused.active_element.send_keys(Keys.CONTROL, "a")
    focused.active_element.send_keys(LYON, Keys.TAB, Keys.TAB, Keys.ENTER)
    page.until(lambda: page.texts("#memory-status") == ["Corrected."], "the correction")
    assert page.texts("#memory-list .content").count(LYON) == 1
    assert focused.active_element.get_attribute("aria-label") == f"Correct: {LYON}"

    last = UUID(page.find("#memory-list > li:last-child").get_attribute("data-id"))
    assert str(last) in books
    assert forget(installation.database, LOCAL, last)
    page.press("Show more")
    page.until(lambda: not page.find("#more-memories").is_displayed() and len(_known(page)) == 25, "the whole list")
    gone = page.find("#memory-list > li:last-child")
    assert forget(installation.database, LOCAL, UUID(gone.get_attribute("data-id")))
    gone.find_element("css selector", ".actions button:last-child").send_keys(Keys.ENTER)
    focused.active_element.send_keys(Keys.ENTER)
    page.until(lambda: len(_known(page)) == 24, "forgotten in both tabs")
    assert [each for each in page.errors() if "status of 404" not in each] == []

    installation.query(
        "UPDATE memories SET valid_to = now() + interval '9 days' WHERE content = %(text)s RETURNING 1", text=LYON
    )
    page.driver.refresh()
    page.see("#text")
    _open(page)
    page.until(lambda: LYON in _known(page), "the memory that still holds")
    page.picture(tmp_path / "changed.png")
    installation.check()
