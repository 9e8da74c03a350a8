"""Fixtures: headless Chromium, a gateway process, and the page of the web chat.

Chromium and its driver must be installed on the system (Debian: `chromium`, `chromium-driver`). If one of them is
missing, the browser tests are skipped. In CI, the tests fail instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.processes.conftest import (
    broker_url,
    celery_backend_cluster,
    celery_broker_cluster,
    celery_setup_cls,
    celery_worker_cluster,
    gateway,
    installation,
    model_server,
    perdure,
    pooled_url,
    redis_server,
    worker_count,
)
from tests.processes.gateway import GatewayProcess
from tests.programs import program

__all__ = [
    "broker_url",
    "celery_backend_cluster",
    "celery_broker_cluster",
    "celery_setup_cls",
    "celery_worker_cluster",
    "gateway",
    "installation",
    "model_server",
    "perdure",
    "pooled_url",
    "redis_server",
    "worker_count",
]

PATIENCE_S = 40.0


@pytest.fixture(scope="session")
def chromium() -> Iterator[webdriver.Chrome]:
    """A headless Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(program("chromedriver")))
    yield driver
    driver.quit()


class Page:
    """Drives the web chat as a user does."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self) -> None:
        """Open the page with empty browser storage."""
        self.driver.get(f"{self.url}/chat/icon.svg")
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear();")
        self.driver.get(self.url)
        self.see("#text")

    def size(self, width: int, height: int) -> None:
        """Set the window's inner size, in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def say(self, text: str) -> None:
        """Write a message and press Enter."""
        box = self.find("#text")
        box.send_keys(text)
        box.send_keys(Keys.ENTER)

    def find(self, selector: str) -> WebElement:
        """The first element that matches `selector`."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """All elements that match `selector`."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, text: str) -> None:
        """Press the button with this text. One script finds and clicks the button, because the page may rebuild it."""
        script = """
            const all = [...document.querySelectorAll("button")];
            const found = all.find(each => each.textContent.trim() === arguments[0]);
            found?.click();
            return found !== undefined;
        """
        self.until(lambda: self.driver.execute_script(script, text), f"the button {text!r}")

    def see(self, selector: str) -> WebElement:
        """Wait until an element that matches `selector` is visible. Returns the first match."""
        self.until(lambda: any(each.is_displayed() for each in self.all(selector)), selector)
        return self.find(selector)

    def texts(self, selector: str = "#log .text") -> list[str]:
        """The text of each element that matches `selector`."""
        found: list[str] = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector
        )
        return found

    def focused(self) -> str:
        """The id of the element that has the keyboard's focus."""
        found: str = self.driver.execute_script("return document.activeElement.id")
        return found

    def until(self, condition: object, what: str) -> None:
        """Wait until `condition` is true."""
        # The page may replace an element after `condition` finds it and before `condition` reads it. A message is not
        # shown before the conversation is open, so a condition may look for the last one of none.
        waiting = WebDriverWait(self.driver, PATIENCE_S, 0.05, [StaleElementReferenceException, IndexError])
        assert callable(condition)
        waiting.until(lambda _driver: condition(), f"waited for {what}; the page has {self.texts()}")

    def errors(self) -> list[str]:
        """Errors that the browser logged since the previous call of this method, except network errors."""
        logged = [each["message"] for each in self.driver.get_log("browser") if each["level"] == "SEVERE"]  # type: ignore[no-untyped-call]
        return [each for each in logged if "net::ERR_" not in each and "favicon" not in each]

    def picture(self, path: Path) -> None:
        """Write a screenshot."""
        assert self.driver.save_screenshot(str(path))


@pytest.fixture
def page(chromium: webdriver.Chrome, gateway: GatewayProcess) -> Iterator[Page]:
    """The opened page. The test fails if the browser has logged an error."""
    made = Page(chromium, gateway.url)
    made.size(1280, 800)
    made.errors()  # those of an earlier test, which shares the browser
    made.open()
    yield made
    assert made.errors() == []
