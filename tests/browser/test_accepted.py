"""The web chat shows each accepted message, also after a reload: queued, failed, resumed, and those of the terminal."""

from __future__ import annotations

import httpx2
import pytest
from pytest_celery import CeleryTestSetup
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.browser.conftest import Page
from tests.cli.conftest import Perdure
from tests.models.server import Answer, Status
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

LOST = "The worker was lost. Another one continues the answer."
LONG_S = 60.0


@pytest.mark.browser
def test_the_messages_of_the_terminal_are_shown_while_they_wait(
    celery_setup: CeleryTestSetup, installation: Installation, perdure: Perdure, gateway: GatewayProcess, page: Page
) -> None:
    """The first `perdure send`s of the user `local` name no conversation. The page shows them and continues."""
    gate = installation.model_server.gate("first")
    for text in ("first", "second", "third"):
        assert perdure("send", text).returncode == 0
    gate.wait()
    page.press("Default conversation")
    for _ in range(2):
        page.until(lambda: page.texts() == ["first", "second", "third"], "all messages")
        page.until(lambda: page.texts(".queued .text") == ["second", "third"], "those that wait")
        page.until(lambda: page.all("#conversations .busy"), "the mark in the list")
        page.driver.refresh()
    gate.opened.set()
    wanted = [each for text in ("first", "second", "third") for each in (text, answer_to(text))]
    page.until(lambda: page.texts() == wanted, "the answers, each after its message")
    page.say("from the page")
    page.until(lambda: page.texts() == [*wanted, "from the page", answer_to("from the page")], "the answer")
    page.until(lambda: not page.all("#conversations .busy, .queued"), "nothing waits")
    [session] = httpx2.get(f"{gateway.url}/v1/sessions", params={"user_id": "local"}).json()
    assert (session["conversation"], sorted(session["channels"])) == (None, ["cli", "web"])


@pytest.mark.browser
def test_unsent_messages_arrive_in_their_order(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """What is written while the gateway is unreachable survives a reload and visits of other conversations."""

    def block(*urls: str) -> None:
        page.driver.execute_cdp_cmd("Network.enable", {})
        page.driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": list(urls)})

    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    block("*/v1/messages")
    try:
        for text in ("one", "two", "three"):
            page.say(text)
        page.press("New conversation")
        page.until(lambda: page.texts() == [], "an empty conversation")
        page.say("elsewhere")
        page.until(lambda: page.texts() == ["elsewhere"], "its own message only")
        page.driver.back()
        page.until(lambda: page.texts(".unsent .text") == ["one", "two", "three"], "the messages again")
        page.driver.refresh()
        page.until(lambda: page.texts(".unsent .text") == ["one", "two", "three"], "also after a reload")
        page.say("four")
    finally:
        block()
    wanted = [each for text in ("hello", "one", "two", "three", "four") for each in (text, answer_to(text))]
    page.until(lambda: page.texts() == wanted, "each answer after its message")
    rows = installation.query("SELECT text FROM inbox ORDER BY accepted_at")
    assert [row.text for row in rows if row.text != "elsewhere"] == wanted[::2]
    assert "elsewhere" in {row.text for row in rows}
    assert "perdure.unsent" not in str(page.driver.execute_script("return Object.keys(sessionStorage)"))


@pytest.mark.browser
def test_what_one_user_wrote_is_not_shown_to_the_next_one(
    celery_setup: CeleryTestSetup, installation: Installation, chromium: webdriver.Chrome
) -> None:
    """Ana's token expires before her message is sent. Ben, who signs in to the same tab, does not see it; she does."""
    keys = {"PERDURE_API_KEYS": "a-service-key-of-these-tests", "PERDURE_SECRET_KEY": "the-secret-of-these-tests"}
    gateway = GatewayProcess(Perdure({**installation.environment, **keys}, installation.directory))
    gateway.start()
    try:
        page = Page(chromium, gateway.url)
        headers = {"Authorization": f"Bearer {keys['PERDURE_API_KEYS']}"}

        def sign_in(user: str) -> None:
            body = {"user_id": user, "ttl_s": 600}
            token = httpx2.post(f"{gateway.url}/v1/tokens", json=body, headers=headers).json()["token"]
            page.driver.get(f"{gateway.url}/chat/icon.svg")
            page.driver.execute_script("sessionStorage.setItem('perdure.token', arguments[0])", token)
            page.driver.get(gateway.url)
            page.until(lambda: page.texts("#user") == [user], "the user")

        sign_in("ana")
        page.say("hello")
        page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
        gateway.stop()
        page.say("a secret of ana")
        page.until(lambda: page.texts(".unsent .text") == ["a secret of ana"], "the message")
        page.driver.get("about:blank")
        gateway.start()
        sign_in("ben")
        page.say("hello")
        page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer to ben only")
        assert page.find("#text").get_property("value") == ""
        sign_in("ana")
        wanted = [each for text in ("hello", "a secret of ana") for each in (text, answer_to(text))]
        page.until(lambda: page.texts() == wanted, "the message and its answer")
        page.errors()
    finally:
        gateway.kill()


@pytest.mark.browser
def test_a_failed_message_is_tried_again_once(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """The button sends the message of a failed turn again. After that, there is no button."""
    installation.model_server.answers["fail"] = Status(400)
    page.say("fail")
    page.see(".failed .retry")
    page.driver.refresh()
    page.see(".failed .retry")
    del installation.model_server.answers["fail"]
    page.find(".failed .retry").send_keys(Keys.ENTER)
    assert page.focused() == "text", "the button is gone"
    wanted = ["fail", "fail", answer_to("fail")]
    page.until(lambda: [each for each in page.texts() if "answer" in each or each == "fail"] == wanted, "the answer")
    page.driver.refresh()
    page.until(lambda: page.texts()[-1:] == [answer_to("fail")], "the conversation again")
    assert page.all(".retry") == []
    rows = installation.query("SELECT message_id FROM inbox ORDER BY accepted_at")
    [failed] = installation.query("SELECT turn_id FROM turns WHERE status = 'failed'")
    assert [row.message_id for row in rows][1:] == [f"retry-{failed.turn_id}"]


@pytest.mark.browser
def test_an_answer_that_was_cut_off_says_so(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    installation.model_server.answers["long"] = Answer("Once upon", finish_reason="length")
    page.say("long")
    page.see(".note")
    page.driver.refresh()
    assert "cut off" in page.see(".note").text


@pytest.mark.browser
def test_a_lost_worker_is_reported_also_after_a_reload(
    installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """A worker is killed during the model call. The page says that another one continues, and shows its answer."""
    first = installation.worker()
    first.ready()
    model_server = installation.model_server
    model_server.latencies["think"] = LONG_S
    page.say("think")
    page.until(lambda: model_server.called_at["think"], "the model call")
    gate = model_server.gate("think", nth=2)
    model_server.latencies["think"] = 0.0
    first.kill("SIGKILL")
    installation.worker().ready()
    gate.wait()
    for _ in range(2):
        page.until(lambda: page.texts(".note") == [LOST], "the note")
        assert page.texts() == ["think"]
        page.driver.refresh()
    gate.opened.set()
    page.until(lambda: page.texts() == ["think", answer_to("think")], "the answer")
    page.see(".rate")  # the turn is settled
    installation.check()


@pytest.mark.browser
def test_a_stopped_answer_is_shown_after_a_reload(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """A message whose answer was stopped does not look as if it waited for its answer."""
    gate = installation.model_server.gate("stop me")
    page.say("stop me")
    gate.wait()
    page.press("Stop")
    page.until(lambda: page.texts(".note") == ["The answer was stopped."], "the answer is stopped")
    page.driver.refresh()
    page.until(lambda: page.texts(".note") == ["The answer was stopped."], "the reason, also after a reload")
    assert page.texts() == ["stop me"]
