"""The console with real traffic: sessions, a turn that was taken over, an approval, deliveries, and the record."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from perdure.access.tenants import UserKey
from tests.browser.conftest import Page
from tests.casebank.bank import put
from tests.memory.remembering import add_memory
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation

LONG_S = 60.0
ANA = UserKey("ana")
PAGES = (
    "status", "sessions", "sessions?show=newest", "turns", "approvals", "deliveries", "memories?user_id=ana", "runs",
    "breakers", "schedules", "pauses", "cost?by=user", "actions",
)  # fmt: skip
KEY, OTHER_KEY, THIRD_KEY = "key-of-the-operator", "key-of-another-operator", "key-of-a-third-operator"
LONGEST_ID = "u" * 200
REFUSES = """
    window.given ??= window.fetch;
    window.sent = [];
    const [status] = arguments;
    window.fetch = (path, asked) => {
      if (asked.method === "GET") return given(path, asked);
      window.sent.push(path);
      return new Promise(done => setTimeout(() => done(new Response("<html>", { status })), 300));
    };
"""
FAILS_LATER = """
    const given = window.fetch;
    window.fetch = (path, asked) => {
      if (asked.method === "GET" || asked.body.includes("dry_run")) return given(path, asked);
      if (!path.endsWith("resend")) return Promise.resolve(new Response("{}"));
      return new Promise((done, failed) => { window.fail = () => failed(new TypeError("late")); });
    };
"""
FOCUSED = "const found = document.activeElement; return found.name || found.id || found.textContent"


@pytest.fixture
def console(chromium: webdriver.Chrome, gateway: GatewayProcess) -> Iterator[Page]:
    """The console's page, signed in. The test fails if the browser has logged an error."""
    made = Page(chromium, gateway.url)
    made.size(1280, 800)
    made.errors()  # those of an earlier test, which shares the browser
    chromium.get(f"{gateway.url}/console")
    made.see("#side")
    yield made
    assert made.errors() == []


def _go(page: Page, address: str) -> None:
    """Go to a page of the console, and wait for its data."""
    page.driver.execute_script("location.hash = arguments[0]", f"#/{address}")
    page.until(lambda: page.driver.execute_script("return location.hash") == f"#/{address}", address)
    page.until(lambda: page.texts("#page .none") != ["Loading…"] and page.texts("#page > *"), f"the data of {address}")
    assert page.texts("#trouble") == [""], address


def _cells(page: Page, column: int) -> list[str]:
    return page.texts(f"#page tbody tr td:nth-child({column})")


def _sure(page: Page) -> None:
    """Confirm the action that was asked about."""
    page.see("#sure[open]")
    page.find("#sure-yes").click()
    page.until(lambda: not page.find("#sure").is_displayed(), "the action is done")


def _recorded(page: Page, actions: set[str]) -> None:
    """These actions are recorded, and each is done."""
    _go(page, "actions")
    page.until(lambda: actions <= set(_cells(page, 4)), "the actions")
    assert set(_cells(page, 8)) == {"done"}


@pytest.mark.browser
def test_an_operator_sees_and_steers_real_traffic(
    installation: Installation, gateway: GatewayProcess, console: Page, tmp_path: Path
) -> None:
    """A worker is killed, another one takes its turn over: the picture shows it. A call is approved in the console.

    A delivery that fails is sent again, and each action is recorded.
    """
    first = installation.worker()
    first.ready()
    model_server = installation.model_server
    model_server.latencies["think"] = LONG_S
    taken = installation.accept("think", reply_to={"url": f"{gateway.url}/nothing"})
    console.until(lambda: model_server.called_at["think"], "the model call")
    model_server.latencies["think"] = 0.0
    _go(console, "sessions")
    console.until(lambda: "held by" in " ".join(_cells(console, 9)), "the session and its holder")
    first.kill("SIGKILL")
    installation.worker().ready()
    installation.settled(taken.turn_id)

    guarded = installation.accept("guarded: pay 5 to \u202e54321\u061c", user="bo")
    _go(console, "approvals")
    console.until(lambda: _cells(console, 1) == ["guarded"], "the call")
    assert r"pay 5 to \u202e54321\u061c" in _cells(console, 2)[0]
    console.picture(tmp_path / "approvals.png")
    console.press("Approve…")
    _sure(console)
    installation.settled(guarded.turn_id)
    console.until(lambda: console.texts("#page .none"), "no call waits")

    _go(console, f"turns/{taken.turn_id}")
    console.see("svg.timeline .mark.takeover")
    assert "took the turn over from" in " ".join(console.texts("svg.timeline .mark.takeover title"))
    assert console.texts("svg.timeline .label")[:2] != []
    console.picture(tmp_path / "taken-over.png")
    _go(console, f"turns/{guarded.turn_id}")
    console.see("svg.timeline .bar.person")
    console.find("details[data-key=prompts] summary").click()
    console.until(lambda: "guarded: pay 5" in " ".join(console.texts("details pre")), "what the model was given")
    console.picture(tmp_path / "turn.png")

    _go(console, "deliveries")
    console.until(lambda: _cells(console, 5) == ["pending"] or _cells(console, 5) == ["failed"], "the delivery")
    console.press("Resend…")
    _sure(console)

    _recorded(console, {"turns.decide", "deliveries.resend"})
    installation.check()


@pytest.mark.browser
def test_an_operator_cancels_tries_again_and_pauses(installation: Installation, console: Page, tmp_path: Path) -> None:
    """A turn is cancelled and tried again, an agent is paused and resumed, and each action is recorded."""
    installation.worker().ready()
    model_server = installation.model_server
    gate = model_server.gate("slow one")
    slow = installation.accept("slow one", user="cy")
    gate.wait()
    _go(console, f"turns/{slow.turn_id}")
    console.press("Cancel…")
    _sure(console)
    console.until(lambda: "cancelled" in console.texts("#page .state"), "the turn is cancelled")
    gate.opened.set()
    console.press("Try again…")
    _sure(console)
    console.until(lambda: str(slow.turn_id) not in console.driver.current_url, "the new turn's page")

    _go(console, "pauses")
    console.press("Pause a tenant, user or agent…")
    console.see("#sure[open]")
    console.find("#sure input[aria-label=agent]").send_keys("none", Keys.ENTER)
    console.until(lambda: _cells(console, 1) == ["agent none"], "the pause")
    console.press("Resume")
    _sure(console)
    console.until(lambda: console.texts("#page .none"), "no pause")

    _recorded(console, {"turns.cancel", "turns.retry", "pauses.begin", "pauses.end"})
    console.picture(tmp_path / "actions.png")
    installation.check()


@pytest.mark.browser
def test_plans_and_memories_are_decided(installation: Installation, console: Page, tmp_path: Path) -> None:
    """A plan shows duplicates side by side, and is rejected; a memory is corrected and forgotten."""
    installation.environment["PERDURE_CASEBANK__APPROVAL"] = "manual"
    installation.worker().ready()
    for number, usage in ((1, 20), (2, 3)):
        put(
            installation.database,
            f"router-{number}",
            query="reset the router",
            vector=[1, 0, 0, 0],
            usage=usage,
            rate=90,
        )
    _go(console, "runs")
    console.press("Run the policy…")
    _sure(console)
    console.until(lambda: console.texts("#page .state") == ["waiting approval"], "the plan")
    console.find("#page tbody a").click()
    console.until(lambda: len(console.texts(".sides .case")) >= 2, "the duplicates")
    console.picture(tmp_path / "plan.png")
    console.press("Reject…")
    _sure(console)
    console.until(lambda: "rejected" in console.texts("#page .state"), "rejected")

    installation.settled(installation.accept("hello").turn_id)
    add_memory(installation.runtime, ANA, "The user lives in Lyon.")
    _go(console, "memories?user_id=ana")
    console.until(lambda: _cells(console, 1) == ["The user lives in Lyon."], "the memory")
    console.press("Correct…")
    box = console.see("#sure textarea")
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys("The user lives in Nice.")
    _sure(console)
    console.until(lambda: "The user lives in Nice." in _cells(console, 1), "the correction")
    console.press("Forget…")
    _sure(console)
    console.until(lambda: "The user lives in Nice." not in _cells(console, 1), "forgotten")
    _recorded(console, {"cases.prune", "cases.reject", "memories.correct", "memories.forget"})


@pytest.mark.browser
def test_each_page_in_both_themes_and_sizes(
    installation: Installation, gateway: GatewayProcess, console: Page, tmp_path: Path
) -> None:
    """Each page loads without an error, and none is wider than its window."""
    installation.worker().ready()
    sent = [installation.accept(text, user=user) for user, text in (("ana", "hello"), ("bo", "pure: look"))]
    installation.settled(*(each.turn_id for each in sent))
    for theme in ("light", "dark"):
        console.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        )
        for width in (1280, 400):
            console.size(width, 800)
            for address in (*PAGES, f"memories?user_id={LONGEST_ID}", f"turns/{sent[1].turn_id}"):
                _go(console, address)
                console.picture(tmp_path / f"{address.partition('?')[0].replace('/', '-')[:12]}-{theme}-{width}.png")
                wide = console.driver.execute_script("return document.documentElement.scrollWidth")
                assert wide <= width, (address, theme)
    console.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    installation.check()


@pytest.mark.browser
def test_a_malformed_address_is_of_nothing(installation: Installation, console: Page) -> None:
    """An address that was cut off within an escaped character shows an error, not the page before it."""
    installation.worker().ready()
    for name, thing in (("turns", "turn"), ("runs", "run")):
        console.driver.execute_script("location.hash = arguments[0]", f"#/{name}/%E0%A4%A")
        console.until(lambda thing=thing: f"no such {thing}" in console.texts("#trouble")[0], "the error")
    assert all("404" in each for each in console.errors())


@pytest.mark.browser
def test_an_error_of_an_action_is_shown_where_it_was_taken(installation: Installation, console: Page) -> None:
    """A button says why it failed, and ignores a second click while it acts. A closed question opens with its error."""
    shown = "The server answered with the status 502."
    for address, name in (("runs", "Plan a run (changes nothing)"), ("deliveries", "Resend all failed…")):
        _go(console, address)
        console.driver.execute_script(REFUSES, 502)
        console.press(name)
        console.press(name)
        console.until(lambda: console.texts("#tools [role=alert]") == [shown], "the error")
        assert len(console.driver.execute_script("return window.sent")) == 1
        console.driver.execute_script("window.fetch = window.given")
    console.find("#tools button").send_keys(Keys.ENTER)
    console.see("#sure[open]")
    assert console.texts("#tools [role=alert]") == []
    console.driver.execute_script(REFUSES, 500)
    console.find("#sure-yes").click()
    console.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    console.until(lambda: "500" in console.texts("#sure-error")[0], "the error")
    assert console.find("#sure").is_displayed()
    console.find("#sure-no").click()
    console.until(lambda: console.driver.execute_script(FOCUSED) == "Resend all failed…", "the focus")


@pytest.mark.browser
def test_an_error_that_comes_after_another_question_is_shown_with_its_own(console: Page) -> None:
    """The dialog opens with the question of the action that failed, not with the one that was asked and done since."""
    _go(console, "deliveries")
    console.driver.execute_script(FAILS_LATER)
    console.press("Resend all failed…")
    console.see("#sure[open]")
    first = console.texts("#sure-title")
    console.find("#sure-yes").click()
    console.find("#sure-no").click()
    _go(console, "runs")
    console.press("Run the policy…")
    console.see("#sure[open]")
    assert console.texts("#sure-title") != first
    console.find("#sure-yes").click()
    console.until(lambda: not console.find("#sure").is_displayed(), "the second action is done")
    console.driver.execute_script("window.fail()")
    console.until(lambda: console.texts("#sure-error") == ["The gateway cannot be reached."], "the error")
    assert console.texts("#sure-title") == first
    console.find("#sure-no").click()


@pytest.mark.browser
def test_an_update_leaves_the_reader_alone(installation: Installation, console: Page) -> None:
    """Text that is selected stays so, the focus stays on its button, and what is typed above a list stays typed."""
    installation.worker().ready()
    installation.accept("hello", user="ana")
    _go(console, "turns")
    focus = console.find("select[name=status]")
    focus.send_keys(Keys.ARROW_DOWN)
    console.until(lambda: "status=failed" in console.driver.current_url, "the choice")
    assert console.driver.execute_script(FOCUSED) == "status"
    console.find("input[name=user_id]").send_keys("an a")
    console.find("input[name=tenant]").send_keys("acme", Keys.ENTER)
    console.until(lambda: "user_id=an+a&tenant=acme" in console.driver.current_url, "both fields")
    assert console.driver.execute_script(FOCUSED) == "tenant"

    _go(console, "status")  # each of its updates has other numbers
    console.until(lambda: console.texts("#page td"), "the processes")
    console.driver.execute_script("getSelection().selectAllChildren(document.querySelector('#page td'))")
    selected = console.driver.execute_script("return String(getSelection())")
    console.until(lambda: console.texts("#fresh") == ["not updated while text is selected"], "an update")
    assert console.driver.execute_script("return String(getSelection())") == selected
    console.driver.execute_script("getSelection().removeAllRanges()")
    console.until(lambda: "as of" in console.texts("#fresh")[0], "the next update")

    slow = installation.model_server.gate("slow one")
    waits = installation.accept("slow one", user="cy")
    slow.wait()
    _go(console, f"turns/{waits.turn_id}")
    console.see("#page .more button").send_keys(Keys.ENTER)
    console.see("#sure[open]")
    before = console.find("#page .more button")
    console.driver.execute_async_script("setTimeout(arguments[0], 4500)")  # two updates
    console.find("#sure-no").click()
    assert console.driver.execute_script(FOCUSED) == "Cancel…"
    console.until(lambda: console.find("#page .more button") != before, "an update")
    assert console.driver.execute_script(FOCUSED) == "Cancel…"
    slow.opened.set()
    installation.settled(waits.turn_id)


@pytest.mark.browser
def test_the_page_begins_when_the_gateway_answers(console: Page) -> None:
    """Until then it says that it cannot be reached."""
    script = """
        const given = window.fetch;
        window.fetch = () => Promise.reject(new TypeError("Failed to fetch"));
        setTimeout(() => { window.fetch = given; }, 1500);
    """
    made = console.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    console.driver.refresh()
    console.until(lambda: console.texts("#trouble") == ["The gateway cannot be reached."], "the error")
    console.until(lambda: "as of" in console.texts("#fresh")[0], "the page")
    assert console.texts("#trouble") == [""]
    console.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", made)


@pytest.mark.browser
def test_an_integer_is_shown_as_the_tool_gets_it(console: Page) -> None:
    """A person who approves the arguments of a call reads all digits of an account's number, and changes none."""
    arguments = '{"account":12345678901234567891,"below":-90071992547409931,"pieces":2,"price":0.5}'
    script = """
        const [text, done] = arguments;
        import("/chat/elements.js").then(({ readJson, shownJson }) => done(shownJson(readJson(text), 0)));
    """
    assert console.driver.execute_async_script(script, arguments) == arguments


@pytest.mark.browser
def test_a_key_that_is_removed_ends_its_sessions(
    installation: Installation, perdure: object, chromium: webdriver.Chrome, tmp_path: Path
) -> None:
    """The page asks for another key, and shows whose it is. A tab whose session another tab replaced says so."""
    keys = tmp_path / "admin.keys"
    keys.write_text(KEY)
    installation.environment["PERDURE_ADMIN_KEYS"] = f"file:{keys}"
    made = GatewayProcess(perdure)  # type: ignore[arg-type]
    made.start()
    page = Page(chromium, made.url)
    chromium.get(f"{made.url}/console")
    page.see("#sign-in[open] #key").send_keys(KEY, Keys.ENTER)
    page.see("#side")
    first = page.texts("#operator")
    keys.write_text(f"{OTHER_KEY}\n{THIRD_KEY}")
    page.until(lambda: "no longer" in page.texts("#sign-in-why")[0], "the key's end is said")
    page.see("#sign-in[open] #key").send_keys(OTHER_KEY, Keys.ENTER)
    page.until(lambda: page.texts("#operator") != first, "the new operator")
    signs_in = 'return fetch("console/session", {method: "POST", headers: {Authorization: "Bearer " + arguments[0]}})'
    chromium.execute_script(f"{signs_in}.then(() => null)", THIRD_KEY)
    page.press("Sign out")
    page.until(lambda: "Not signed out" in page.texts("#trouble")[0], "why the tab did not sign out")
    page.errors()
    made.kill()


@pytest.mark.browser
def test_the_console_asks_for_a_key(installation: Installation, perdure: object, chromium: webdriver.Chrome) -> None:
    """A wrong key is refused with its reason. The key is not in the browser's storage. Signing out asks again."""
    installation.environment["PERDURE_ADMIN_KEYS"] = KEY
    made = GatewayProcess(perdure)  # type: ignore[arg-type]
    made.start()
    page = Page(chromium, made.url)
    chromium.get(f"{made.url}/console")
    page.see("#sign-in[open] #key").send_keys(Keys.ESCAPE)
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)  # the second one closes any dialog
    page.see("#sign-in[open]").find_element("css selector", "#key").send_keys("wrong-key-of-nobody", Keys.ENTER)
    page.until(lambda: "known" in page.texts("#sign-in-why")[0], "the reason")
    page.find("#key").clear()
    page.find("#key").send_keys(KEY, Keys.ENTER)
    page.see("#side")
    assert KEY not in str(chromium.execute_script("return [localStorage, sessionStorage, document.cookie]"))
    page.driver.refresh()
    page.see("#side")
    page.press("Sign out")
    page.see("#sign-in[open]")
    page.errors()
    made.kill()
