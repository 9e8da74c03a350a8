"""The web chat when requests fail: errors stay in view, what was written is kept, and no request is waited for forever.

The tests replace the page's `fetch`, since a gateway does not fail on demand.
"""

from __future__ import annotations

import httpx2
import pytest
from pytest_celery import CeleryTestSetup
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import Page
from tests.cli.conftest import Perdure
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

REFUSES = """
    window.given ??= window.fetch;
    window.reads = 0;
    const [method, status, detail] = arguments;
    window.fetch = (path, asked) => {
      window.reads += path.startsWith("v1/conversations");
      if (asked.method !== method) return given(path, asked);
      return Promise.resolve(new Response(detail === null ? "<html>" : JSON.stringify({ detail }), { status }));
    };
"""
ALLOWS = "window.fetch = window.given"
READS = "return window.reads"
LOSES = """
    // The first message has no answer, the first stream has no bytes. Times of at least 30 s are a hundredth.
    const given = window.fetch, wait = window.setTimeout;
    window.setTimeout = (act, time, ...more) => wait(act, time >= 30_000 ? time / 100 : time, ...more);
    window.lost = [];
    window.fetch = (path, asked) => {
      const kind = path.endsWith("/events") ? "stream" : asked.method === "POST" ? "message" : null;
      if (kind === null || window.lost.includes(kind)) return given(path, asked);
      window.lost.push(kind);
      if (kind === "stream") return Promise.resolve(new Response(new ReadableStream({})));
      return new Promise((_, fail) => asked.signal.addEventListener("abort", () => fail(asked.signal.reason)));
    };
"""


@pytest.mark.browser
def test_an_error_is_shown_until_something_else_is_done(page: Page) -> None:
    """The page reads its list every few seconds, which does not hide why a message was refused. Its text is kept.

    An answer of a proxy, which has no detail, is an error, too. A limit is shown as the gateway says it.
    """
    page.until(lambda: page.texts("#log .empty"), "the conversation")
    for detail, shown in (("The text is refused.",) * 2, (None, "The server answered with the status 400.")):
        page.driver.execute_script(REFUSES, "POST", 400, detail)
        page.say("" if detail is None else "my words")
        page.until(lambda shown=shown: page.texts("#status") == [shown], "the error")
        page.until(lambda: page.driver.execute_script(READS) >= 2, "the list, twice")
        assert page.texts("#status") == [shown]
        assert page.find("#text").get_property("value") == "my words"
    page.driver.execute_script(REFUSES, "POST", 429, "Too many messages.")
    page.find("#text").send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#status") == ["Too many messages. Trying again…"], "the limit")
    page.driver.execute_script(ALLOWS)
    page.until(lambda: page.texts("#log .user:not(.unsent) .text") == ["my words"], "the message is accepted")
    page.until(lambda: "Trying" not in page.texts("#status")[0], "no error")


@pytest.mark.browser
def test_a_rating_that_is_refused_is_not_shown_as_given(celery_setup: CeleryTestSetup, page: Page) -> None:
    """Its button is pressed only after the gateway has taken it."""
    page.say("hello")
    page.until(lambda: page.all(".rate button"), "the rating")
    pressed = "return [...document.querySelectorAll('.rate button')].map(each => each.getAttribute('aria-pressed'))"
    page.driver.execute_script(REFUSES, "POST", 400, "No rating.")
    page.press("Helpful")
    page.until(lambda: page.texts("#status") == ["No rating."], "the error")
    assert page.driver.execute_script(pressed) == ["false", "false"]
    page.driver.execute_script(ALLOWS)
    page.press("Helpful")
    page.until(lambda: page.driver.execute_script(pressed) == ["true", "false"], "the rating is given")


@pytest.mark.browser
def test_a_request_without_an_answer_is_sent_again(
    celery_setup: CeleryTestSetup, installation: Installation, page: Page
) -> None:
    """A message, and a stream of events, whose connection is lost without an end. The message is accepted once."""
    page.until(lambda: page.texts("#log .empty"), "the conversation")
    page.driver.execute_script(LOSES)
    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    assert page.driver.execute_script("return window.lost") == ["message", "stream"]
    assert len(installation.query("SELECT 1 FROM turns")) == 1


@pytest.mark.browser
def test_a_token_that_ends_is_asked_for_where_the_user_is(
    installation: Installation, chromium: webdriver.Chrome
) -> None:
    """The page says why, and after another token it has what the user was writing."""
    keys = {"PERDURE_API_KEYS": "a-service-key-of-these-tests", "PERDURE_SECRET_KEY": "the-secret-of-these-tests"}
    gateway = GatewayProcess(Perdure({**installation.environment, **keys}, installation.directory))
    gateway.start()
    try:
        page = Page(chromium, gateway.url)
        headers = {"Authorization": f"Bearer {keys['PERDURE_API_KEYS']}"}
        body = {"user_id": "ana", "ttl_s": 600}
        token = httpx2.post(f"{gateway.url}/v1/tokens", json=body, headers=headers).json()["token"]
        chromium.get(gateway.url)
        page.see("#token").send_keys(token + Keys.ENTER)
        page.until(lambda: page.texts("#log .empty"), "the conversation")
        page.driver.execute_script(REFUSES, "POST", 401, "The token has expired.")
        page.say("my words")
        page.see("#sign-in[open]")
        assert page.texts("#sign-in-why") == ["The token has expired."]
        page.find("#token").send_keys(token + Keys.ENTER)
        page.until(lambda: page.find("#text").get_property("value") == "my words", "what was written")
        page.errors()
    finally:
        gateway.kill()


@pytest.mark.browser
def test_the_focus_returns_to_the_menu(celery_setup: CeleryTestSetup, page: Page) -> None:
    """Escape closes the menu, and a dialog that was opened from it, without losing the keyboard's place."""
    page.say("hello")
    page.until(lambda: page.find("#menu").is_displayed(), "the menu")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    focused = "return document.activeElement.matches('#menu summary')"
    page.find("#menu summary").click()
    page.driver.execute_script("document.getElementById('end').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.find("#rename").is_displayed(), "the menu is closed")
    assert page.driver.execute_script(focused)
    page.find("#menu summary").click()
    page.find("#rename").click()
    page.see("#rename-dialog[open]")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.until(lambda: not page.find("#rename-dialog").is_displayed(), "the dialog is closed")
    page.until(lambda: page.driver.execute_script(focused), "the focus")


@pytest.mark.browser
def test_text_has_the_direction_of_its_script(page: Page) -> None:
    """Hebrew is written, and shown in messages and lists, from right to left; code and English are not."""
    shown = page.driver.execute_async_script("""
        const done = arguments[0];
        Promise.all([import("/chat/turn.js"), import("/chat/text.js")]).then(([{ userMessage }, { rendered }]) => {
          const text = "שבת!\\n\\n1. שבת\\n\\n```\\nשבת\\n```\\n\\nhello";
          document.getElementById("log").replaceChildren(userMessage("שבת!"), ...rendered(text));
          document.getElementById("text").value = "שבת!";
          const all = [...document.querySelectorAll("#log .text, #log > p, #log > ol, #log > .code > pre, #text")];
          done(all.map(each => `${each.tagName} ${getComputedStyle(each).direction}`));
        });
    """)
    assert shown == ["DIV rtl", "P rtl", "OL rtl", "PRE ltr", "P ltr", "TEXTAREA rtl"]
