"""The web chat: conversations, approvals, tool calls, hostile text, and a gateway that is killed during an answer."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from pytest_celery import CeleryTestSetup
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from perdure.access.tenants import UserKey
from perdure.text.quoting import MESSAGE, quoted
from tests.browser.conftest import Page
from tests.cli.conftest import Perdure
from tests.files.contents import pdf, png
from tests.memory.remembering import add_memory
from tests.models.server import Answer, Status
from tests.processes.gateway import GatewayProcess
from tests.processes.installation import Installation
from tests.processes.model_server import answer_to

STORY = " ".join(f"word{number}" for number in range(80))
HOSTILE = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script> **bold** [x](javascript:1)"


@pytest.mark.long
def test_an_answer_continues_after_the_gateway_is_killed(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """After the gateway is killed and restarted, the page resumes the answer by itself and shows each word once."""
    installation.model_server.answers["tell"] = Answer(STORY, piece=6, interval_s=0.03)
    page.say("tell")
    page.until(lambda: "word9 " in page.texts()[-1], "the first words")
    gateway.kill()
    gateway.start()
    page.until(lambda: page.texts() == ["tell", STORY], "the whole answer, each word once")
    page.until(lambda: not page.all(".streaming"), "the answer is complete")
    page.driver.refresh()
    page.until(lambda: page.texts() == ["tell", STORY], "the conversation again")
    installation.check()


@pytest.mark.exhaustive
def test_a_message_before_the_conversation_is_open(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """On a slow connection, the page keeps what the user sends before the list has arrived, and sends it then."""
    slow = {"offline": False, "latency": 800, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
    page.open()
    assert not page.driver.execute_script("return location.hash"), "no conversation is open"
    page.say("hello")
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**slow, "latency": 0})
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")


@pytest.mark.browser
def test_the_whole_story(
    celery_setup: CeleryTestSetup,
    installation: Installation,
    gateway: GatewayProcess,
    page: Page,
    tmp_path: Path,
) -> None:
    """The page handles two conversations, an approval, a rating, a rename, a stop, hostile text and a small screen."""
    page.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    assert "Asia/Tokyo" in str(installation.model_server.server.requests[-1]["messages"])
    page.press("Helpful")
    page.until(lambda: page.all('.rate button[aria-pressed="true"]'), "the rating is kept")

    page.press("New conversation")
    page.until(lambda: page.texts() == [], "an empty conversation")
    page.say("guarded: pay")
    page.see(".approval")
    page.find(".approval button:last-child").send_keys(Keys.ENTER)
    page.until(lambda: page.texts()[-1].startswith("answer to 'guarded: pay'"), "the answer after the approval")
    assert page.focused() == "text", "the card with the button is gone"
    page.until(lambda: len(page.all("#conversations button")) == 2, "both conversations are listed")
    page.until(lambda: not page.all(".approval"), "the approval is decided")

    page.find("#menu summary").click()
    page.press("Rename")
    title = page.see("#new-title")
    title.clear()
    title.send_keys("Payments")
    page.press("Save")
    page.until(lambda: page.find("h1").text == "Payments", "the new title")

    page.press("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the first conversation again")

    installation.model_server.answers["long"] = Answer(STORY, piece=4, interval_s=0.1)
    page.say("long")
    page.until(lambda: "word1" in page.texts()[-1], "the first words")
    page.press("Stop")
    page.until(lambda: "The answer was stopped." in page.texts(".note"), "the answer is stopped")

    installation.model_server.answers["hostile"] = Answer(HOSTILE)
    page.say("hostile")
    page.until(lambda: any("onerror" in each for each in page.texts()), "HTML in the answer is shown as text")
    assert page.all("#log img, #log script, #log a[href^='javascript']") == []
    assert page.driver.title != "bad"

    page.press("New conversation")
    page.say(HOSTILE)
    page.until(lambda: page.texts()[:1] == [HOSTILE], "HTML in the message is shown as text")
    for width, height in ((1280, 800), (390, 844)):
        page.size(width, height)
        page.picture(tmp_path / f"{width}.png")
        wide = page.driver.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
    page.find("#open-side").click()
    page.see("#conversations")
    page.picture(tmp_path / "390-list.png")


@pytest.mark.browser
def test_the_address_is_that_of_the_conversation(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """The page opens the conversation of a changed address, and goes back. A malformed address opens the newest one."""

    def address() -> str:
        found: str = page.driver.execute_script("return location.hash")
        return found

    addresses = []
    for text in ("first", "second"):
        page.press("New conversation")
        page.until(lambda: page.texts() == [], "an empty conversation")
        page.say(text)
        page.until(lambda text=text: page.texts() == [text, answer_to(text)], "the answer")
        addresses.append(address())
    page.driver.execute_script("location.hash = arguments[0]", addresses[0])
    page.until(lambda: page.texts() == ["first", answer_to("first")], "the conversation of the address")
    page.until(lambda: page.find("h1").text == "first", "its title")
    page.driver.back()
    page.until(lambda: page.texts() == ["second", answer_to("second")], "the conversation before it")
    page.driver.execute_script("location.hash = '#%E0%A4%A'")
    page.until(lambda: address() == addresses[1], "a malformed address is replaced")
    page.driver.execute_script("document.querySelector('.skip').click()")
    assert (page.focused(), address()) == ("text", addresses[1])
    page.driver.get(f"{gateway.url}/chat/icon.svg")
    page.driver.get(f"{gateway.url}/#%E0%A4%A")
    page.until(lambda: page.texts() == ["second", answer_to("second")], "the newest conversation")
    assert address() == addresses[1]


DEEP = "".join("  " * depth + f"- {depth}\n" for depth in range(40))
SHOWN = {
    "Run this:\n```ls -la /etc```\nthen look": "<p>Run this:<br><code>ls -la /etc</code><br>then look</p>",
    "```sh\nls\n```\nDone": "<pre><code>ls</code></pre><p>Done</p>",
    "```\nopen\n`x`": "<pre><code>open\n`x`</code></pre>",
    "````\n```\nx\n```\n````": "<pre><code>```\nx\n```</code></pre>",
    "1. a\n2. b": '<ol start="1"><li>a</li><li value="2">b</li></ol>',
    "1. a\n\n2. b": '<ol start="1"><li><p>a</p></li><li value="2"><p>b</p></li></ol>',
    "1. a\n  - b\n    - c\n2. d": (
        '<ol start="1"><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li value="2">d</li></ol>'
    ),
    "10. a\n   1. b\n     - c\n   2. d": (
        '<ol start="10"><li>a<ol start="1"><li>b<ul><li>c</li></ul></li><li value="2">d</li></ol></li></ol>'
    ),
    "1. a\n\n  - b\n  ```\n  - c\n  ```\n\nEnd\n\n  - d": (
        '<ol start="1"><li><p>a</p><ul><li>b</li></ul><pre><code>- c</code></pre></li></ol>'
        "<p>End</p><ul><li>d</li></ul>"
    ),
    "```\n1. a\n  - b\n```": "<pre><code>1. a\n  - b</code></pre>",
    "7. The seventh": '<ol start="7"><li>The seventh</li></ol>',
    "1. a\n1. b\nlazy": '<ol start="1"><li>a</li><li>b<br>lazy</li></ol>',
    "Here:\n- a\n  - b\n    1. c\n- d\n\nEnd": (
        '<p>Here:</p><ul><li>a<ul><li>b<ol start="1"><li>c</li></ol></li></ul></li><li>d</li></ul><p>End</p>'
    ),
    "1. Create:\n   ```python\n   if x:\n       y\n   ```\n2. Run": (
        '<ol start="1"><li>Create:<pre><code>if x:\n    y</code></pre></li><li value="2">Run</li></ol>'
    ),
    "1. Create:\n   ```python\nif x:\n    y\n```\n2. Run": (
        '<ol start="1"><li>Create:<pre><code>if x:\n    y</code></pre></li><li value="2">Run</li></ol>'
    ),
    "- a\n  ```\nx\n  ```\nEnd": "<ul><li>a<pre><code>x</code></pre></li></ul><p>End</p>",
    "> ```\n> x\nEnd": "<blockquote><pre><code>x</code></pre></blockquote><p>End</p>",
    "In\n2019. Then": "<p>In<br>2019. Then</p>",
    "(https://a.b/c_(d)). <b>": '<p>(<a href="https://a.b/c_(d)">https://a.b/c_(d)</a>). &lt;b&gt;</p>',
    "[x](https://a.b/c_(d)) [j](javascript:x)": '<p><a href="https://a.b/c_(d)">x</a> [j](javascript:x)</p>',
    "a@b.c www.a.b ftp://a.b [m](mailto:a@b.c) [r](/v1)": ("<p>a@b.c www.a.b ftp://a.b [m](mailto:a@b.c) [r](/v1)</p>"),
    "``a`b`` **bold** *it* ~~old~~": ("<p><code>a`b</code> <strong>bold</strong> <em>it</em> <s>old</s></p>"),
    "2*3*4 x**2 + y**2 __init__ **API**s": "<p>2*3*4 x**2 + y**2 __init__ <strong>API</strong>s</p>",
    "**標題：**內容 **「あ」**の": "<p><strong>標題：</strong>內容 <strong>「あ」</strong>の</p>",  # noqa: RUF001
    "# Title\nText\n###### Least": "<h3>Title</h3><p>Text</p><h6>Least</h6>",
    "text\n---\n> q\n\n    far": "<p>text</p><hr><blockquote><p>q</p></blockquote><p>far</p>",
    "[1]: https://a.b &lt;": '<p>[1]: <a href="https://a.b">https://a.b</a> &amp;lt;</p>',
    "| a | b |\n|:-|-|\n| 1<br>2 | **x** \\| y |": (
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
        '<thead><tr><th class="left">a</th><th class="">b</th></tr></thead><tbody><tr><td class="left">1<br>2</td>'
        '<td class=""><strong>x</strong> | y</td></tr></tbody></table></div>'
    ),
    "- [ ] a\n- [x] b": (
        '<ul><li class="task"><input type="checkbox" disabled="" aria-label="To do"> a</li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="Done"> b</li></ul>'
    ),
    "![alt](https://a.b/x) ![](https://a.b) [![i](https://a.b)](https://c.d)": (
        '<p><a href="https://a.b/x">alt</a> <a href="https://a.b">https://a.b</a> <a href="https://c.d">i</a></p>'
    ),
}
"""Markdown, and what the page makes of it, without buttons and the attributes of links that are always the same."""

RENDER = """
    const [texts, done] = arguments;
    import("./chat/text.js").then(({ rendered }) => done(texts.map((text) => {
      const made = document.createElement("div");
      made.append(...rendered(text));
      for (const each of made.querySelectorAll("*")) {
        for (const name of ["dir", "rel", "target"]) each.removeAttribute(name);
      }
      for (const each of made.querySelectorAll(".code")) each.replaceWith(each.querySelector("pre"));
      return made.innerHTML;
    })));
"""

HOSTILE_TEXTS = {
    "nested lists": "- " * 50_000 + "a",
    "items": "- a\n" * 25_000,
    "backticks": "`" * 100_000,
    "code in a line": "` " * 50_000,
    "URLs": "https://a(" * 10_000,
    "fences": "```\n" * 25_001,
    "fences in items": "- ```\nx\n" * 12_000,
    "tildes": "~" * 100_000 + "`",
    "brackets": "[" * 100_000,
    "links": "[a](" * 25_000,
    "images": "![" * 50_000,
    "emphasis": "*_" * 50_000,
    "nested emphasis": "*a " * 10_000 + "a* " * 10_000,
    "quotations": ">" * 100_000,
    "lines of quotations": "> > > > > > > > > > > > > > > > > > a\n" * 2_500,
    "a wide table": "\n".join("|" + cell * 2_000 for cell in ("a|", "-|", *["b|"] * 25)),
    "a table of empty rows": "|" + "a|" * 2_000 + "\n|" + "-|" * 2_000 + "\n" + "|\n" * 25_000,
    "deep lists": "".join("  " * depth + "- a\n" for depth in range(400)),
    "a megabyte": "Some **bold** words, and a [link](https://a.example).\n\n" * 20_000,
}
MOST_S = 8.0

TIMES = """
    const [text, done] = arguments, log = document.getElementById("log");
    import("./chat/text.js").then(({ rendered }) => {
      const began = performance.now(), made = document.createElement("div");
      made.append(...rendered(text));
      log.replaceChildren(made);
      log.scrollHeight; // lays it out
      const took = (performance.now() - began) / 1000;
      let depth = 0;
      for (let at = made; at; at = at.lastElementChild) depth += 1;
      done([took, depth, made.textContent.length]);
    });
"""

GROWS = """
    const [text, size, done] = arguments;
    import("./chat/text.js").then(async ({ Growing, rendered }) => {
      const shown = document.createElement("div"), whole = document.createElement("div"), growing = new Growing(shown);
      whole.append(...rendered(text));
      const first = [];
      for (let at = 0; at < text.length; at += size) {
        growing.add(text.slice(at, at + size));
        first.push(shown.firstChild);
        if (at % 10 === 0) await new Promise((next) => setTimeout(next));
      }
      const wait = () => shown.innerHTML === whole.innerHTML ? done([true, new Set(first.slice(-20)).size])
        : setTimeout(wait, 20);
      setTimeout(() => done([shown.innerHTML, whole.innerHTML]), 8_000);
      wait();
    });
"""


@pytest.mark.browser
def test_the_page_shows_markdown(page: Page, tmp_path: Path) -> None:
    """Nothing of a text disappears. Lists keep their numbers and are nested. No image is loaded."""
    assert dict(zip(SHOWN, page.driver.execute_async_script(RENDER, list(SHOWN)), strict=True)) == SHOWN
    deep, quoted_deep = page.driver.execute_async_script(RENDER, [DEEP, ">" * 50 + " deep"])
    assert all(f"{depth}" in deep for depth in range(40))
    assert deep.count("<ul>") == 8
    assert quoted_deep.endswith(f"<p>{'&gt;' * 34} deep</p>{'</blockquote>' * 16}")


@pytest.mark.browser
def test_hostile_text_is_shown_in_time(page: Page) -> None:
    """No text stops the page or nests elements without a limit. One that needs too many elements is shown as it is."""
    for name, text in HOSTILE_TEXTS.items():
        took, depth, length = page.driver.execute_async_script(TIMES, text)
        assert took < MOST_S, name
        assert depth < 80, name
        assert length > 0, name


@pytest.mark.browser
def test_a_text_that_grows_becomes_the_same(page: Page) -> None:
    """While an answer streams, only its last blocks are made again. The result is that of the whole text."""
    text = "\n\n".join([*(each for each in SHOWN if "open" not in each), "```py\nlast\n\nblock\n```", "end"])
    for size in (1, 7, 1_000):
        same, made = page.driver.execute_async_script(GROWS, text, size)
        assert same is True, made
        assert made == 1, "the first block is not made again"
    long = "word " * 70_000
    same, _ = page.driver.execute_async_script(GROWS, long, 20_000)
    assert same is True


@pytest.mark.browser
def test_code_is_copied(page: Page) -> None:
    """The button below a code block is reached with the keyboard, and is not part of the selected text."""
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    page.driver.execute_async_script("""
        const done = arguments[0];
        import("./chat/turn.js").then(({ agentMessage }) => {
          document.getElementById("log").replaceChildren(agentMessage("Run:\\n```\\na = 1\\n\\nb\\n```"));
          document.getElementById("log").focus();
          done();
        });
    """)
    selected = """
        getSelection().selectAllChildren(document.querySelector(".message"));
        return getSelection().toString().split(/\\s+/).join(" ").trim();
    """
    assert page.driver.execute_script(selected) == "Run: a = 1 b"
    page.driver.execute_script("document.querySelector('.copy').focus()")
    page.driver.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.texts(".copy") == ["Copied"], "it says so")
    read = "const [done] = arguments; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    assert page.driver.execute_async_script(read) == "a = 1\n\nb"
    page.until(lambda: page.texts(".copy") == ["Copy"], "it can be pressed again")


@pytest.mark.browser
def test_files_are_sent(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page, tmp_path: Path
) -> None:
    """20 MB of PDF and an image of 4,000 pixels. The model's server gets the image, and a description of the PDF.

    A file that is refused stays in its place with the reason. The transcript shows the image, also after a reload.
    """
    contents = {"cat.png": png(4_000, 4_000, padding=2**20), "bill.pdf": pdf(2, size=20 * 2**20)}
    for name, content in {**contents, "bomb.png": png(10**6, 1)}.items():
        (tmp_path / name).write_bytes(content)
        page.find("#file").send_keys(str(tmp_path / name))
    page.until(lambda: "bomb.png: " in "".join(page.texts("#files .refused")), "the bomb is refused")
    assert "1,000,000 by 1 pixels" in page.texts("#files .refused")[0]
    page.until(lambda: len(page.all("#files li:not([aria-busy], .refused)")) == 2, "the files are uploaded")
    assert ["400" in each for each in page.errors()] == [True]
    page.say("What are these?")
    described = (
        f"[file: bill.pdf, application/pdf, 2 pages, {20 * 2**20 / 10**6:.1f} MB; its content is not shown here]"
    )
    page.until(
        lambda: page.texts() == ["bill.pdfWhat are these?", answer_to(f"What are these?\n\n{described}")],
        "the answer",
    )
    content = installation.model_server.server.requests[-1]["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text"]
    assert page.all("#files li") == []
    width = "return document.querySelector('.file.image img')?.naturalWidth"
    page.until(lambda: page.driver.execute_script(width) == 4_000, "the image")
    page.driver.refresh()
    page.until(lambda: page.texts()[:1] == ["bill.pdfWhat are these?"], "the conversation again")
    page.until(lambda: page.driver.execute_script(width) == 4_000, "the image again")
    page.size(400, 800)
    page.picture(tmp_path / "files.png")
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 400


@pytest.mark.browser
def test_files_are_pasted_and_dropped(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """A file that is pasted into the text, and one that is dropped outside it, are sent with the message."""
    script = """
        const [selector, kind, name] = arguments, data = new DataTransfer();
        data.items.add(new File(["hello"], name, { type: "text/plain" }));
        const options = { bubbles: true, cancelable: true };
        const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: data })
                                       : new DragEvent(kind, { ...options, dataTransfer: data });
        return !document.querySelector(selector).dispatchEvent(event);
    """
    assert page.driver.execute_script(script, "#text", "paste", "pasted.txt") is True
    assert page.driver.execute_script(script, "#log", "dragover", "dropped.txt") is True
    assert page.driver.execute_script(script, "#log", "drop", "dropped.txt") is True
    page.until(lambda: len(page.all("#files li:not([aria-busy], .refused)")) == 2, "the files are uploaded")
    page.say("Read them")
    page.until(lambda: page.texts()[:1] == ["pasted.txtdropped.txtRead them"], "the message")
    page.until(lambda: len(page.texts()) == 2, "the answer")
    asked = str(installation.model_server.server.requests[-1]["messages"][-1])
    assert "pasted.txt" in asked
    assert "dropped.txt" in asked
    slow = {"offline": False, "latency": 500, "downloadThroughput": -1, "uploadThroughput": -1}
    page.driver.execute_cdp_cmd("Network.enable", {})
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", slow)
    assert page.driver.execute_script(script, "#text", "paste", "slow.txt") is True
    page.say("first")
    page.say("second")
    page.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**slow, "latency": 0})
    page.until(lambda: page.texts(".user .text")[1:] == ["slow.txtfirst", "second"], "each file once, in order")


@pytest.mark.browser
def test_a_message_sent_while_an_answer_streams_waits_for_it(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """A message sent during an answer is shown after the whole answer. A reload shows the same order."""
    installation.model_server.answers["tell"] = Answer(STORY, piece=6, interval_s=0.03)
    page.say("tell")
    page.until(lambda: "word3 " in page.texts()[-1], "the first words")
    page.say("and you?")
    wanted = ["tell", STORY, "and you?", answer_to("and you?")]
    page.until(lambda: page.texts() == wanted, "both answers, each after its message")
    page.until(lambda: not page.all(".queued, .streaming"), "no message is queued")
    page.driver.refresh()
    page.until(lambda: page.texts() == wanted, "the same conversation")


@pytest.mark.browser
def test_the_end_of_an_answer_stays_in_view_when_a_keyboard_opens(
    celery_setup: CeleryTestSetup, installation: Installation, page: Page
) -> None:
    """A phone's keyboard halves the log, while an answer streams and afterwards."""
    lines = "\n\n".join(f"line {number}" for number in range(120))
    installation.model_server.answers["long"] = Answer(lines, piece=8, interval_s=0.01)
    log = "const log = document.getElementById('log'); return log"
    left = f"{log}.scrollHeight - log.scrollTop - log.clientHeight"

    def resize(height: int) -> None:
        before = page.driver.execute_script(f"{log}.clientHeight")
        page.size(400, height)
        page.until(lambda: page.driver.execute_script(f"{log}.clientHeight") != before, "the page has the size")

    resize(800)
    page.say("long")
    page.until(lambda: "line 50" in page.texts()[-1], "the beginning")
    resize(420)
    page.see(".rate")
    page.until(lambda: page.driver.execute_script(left) < 60, "the end, of the answer that streamed")
    resize(800)
    page.driver.refresh()  # nothing happens any more, for which the page would scroll
    page.until(lambda: "line 119" in page.texts()[-1] and page.driver.execute_script(left) < 60, "the end, reloaded")
    resize(420)
    page.driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert page.driver.execute_script(left) < 60, "at once"


@pytest.mark.browser
def test_the_enter_that_ends_a_composition_sends_nothing(celery_setup: CeleryTestSetup, page: Page) -> None:
    """Safari ends the composition of an input method before the key's event, which only has the code 229."""
    page.find("#text").send_keys("nihon")
    for given in ("keyCode: 229", "keyCode: 13, isComposing: true"):
        page.driver.execute_script(
            "document.getElementById('text').dispatchEvent("
            f"new KeyboardEvent('keydown', {{key: 'Enter', bubbles: true, cancelable: true, {given}}}))"
        )
    assert page.find("#text").get_property("value") == "nihon"
    assert page.texts() == []
    page.find("#text").send_keys(Keys.ENTER)
    page.until(lambda: page.texts() == ["nihon", answer_to("nihon")], "the answer")


@pytest.mark.browser
def test_each_tool_call_is_shown_and_its_result_is_text(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """Each tool call is shown with its own result, even if calls of two turns have equal ids.

    HTML in arguments and results is shown as text.
    """

    def calls() -> list[str]:
        return page.texts("details.tool pre")

    page.say("pure: <b>one</b>")
    page.until(lambda: len(calls()) == 2, "the first call and its result")
    page.say("pure: <i>two</i>")
    page.until(lambda: len(calls()) == 4, "the second call and its result")
    assert all("<b>one</b>" in each for each in calls()[:2])
    assert all("<i>two</i>" in each for each in calls()[2:])
    assert page.all("#log b, #log i") == []
    page.until(lambda: len(page.texts()) == 4, "both answers")
    shown = calls()
    page.driver.refresh()
    page.until(lambda: calls() == shown, "the same calls")


@pytest.mark.browser
def test_two_tabs_send_at_once(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """If two tabs send to the same conversation concurrently, each message gets one answer."""
    page.say("first")
    page.until(lambda: page.texts() == ["first", answer_to("first")], "the answer")
    one = page.driver.current_window_handle
    where = page.driver.current_url
    page.driver.switch_to.new_window("tab")
    page.driver.get(where)
    page.until(lambda: page.texts() == ["first", answer_to("first")], "the conversation in the other tab")
    page.say("from two")
    page.driver.switch_to.window(one)
    page.say("from one")
    page.until(lambda: answer_to("from one") in page.texts(), "the answer in the first tab")
    page.driver.refresh()
    wanted = {"first", "from one", "from two", *map(answer_to, ("first", "from one", "from two"))}
    page.until(lambda: set(page.texts()) == wanted and len(page.texts()) == len(wanted), "each message and answer once")
    installation.check()


@pytest.mark.browser
def test_a_failure_is_an_error_also_when_the_page_is_reloaded(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """The page shows a failed turn's text as an error, and the answers before and after it as answers."""
    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    installation.model_server.answers["fail"] = Status(400)
    page.say("fail")
    page.until(lambda: page.all(".assistant.failed"), "the error")
    page.say("again")
    page.until(lambda: page.texts()[-1] == answer_to("again"), "the next answer")
    page.driver.refresh()
    page.until(lambda: page.texts()[-1:] == [answer_to("again")], "the conversation again")
    marked = [each.get_attribute("aria-label") for each in page.all(".message")]
    assert marked == ["You", "Agent", "You", "Error", "You", "Agent"]
    assert len(page.all(".assistant.failed")) == 1


@pytest.mark.browser
def test_an_archived_conversation_is_restored_by_keyboard(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """An archived conversation disappears from the list. By keyboard, the user restores it and sees its messages."""
    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    page.find("#menu summary").click()
    page.press("Archive")
    page.until(lambda: page.texts() == [], "an empty conversation")
    page.until(lambda: page.texts("#conversations button") == [], "nothing is listed")
    page.find("#archived summary").send_keys(Keys.ENTER)
    page.until(lambda: len(page.texts("#archived-conversations span")) == 1, "it is listed as archived")
    page.find("#archived-conversations button").send_keys(Keys.ENTER)
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "its messages")
    page.until(lambda: len(page.texts("#conversations button")) == 1, "it is in the list")
    assert page.texts("#archived-conversations span") == []


@pytest.mark.browser
def test_a_turn_of_another_device_is_followed(
    celery_setup: CeleryTestSetup, installation: Installation, gateway: GatewayProcess, page: Page
) -> None:
    """The page shows the messages of another device and the answers to them. The keyboard focus does not move."""
    page.say("hello")
    page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
    key = page.driver.current_url.partition("#")[2]

    def send(text: str) -> None:
        body = {"user_id": "local", "channel": "phone", "conversation": key, "text": text}
        assert httpx2.post(f"{gateway.url}/v1/messages", json=body).status_code == 202

    page.driver.execute_script("document.querySelector('#conversations button').focus()")
    installation.model_server.answers["tell"] = Answer(STORY, piece=6, interval_s=0.1)
    send("tell")
    page.until(lambda: "word3 " in page.texts()[-1] and page.all(".streaming"), "the first words, while it is written")
    wanted = ["hello", answer_to("hello"), "tell", STORY]
    page.until(lambda: page.texts() == wanted, "its answer")
    focused = page.driver.execute_script("return document.activeElement.textContent")
    page.until(lambda: not page.all(".streaming"), "the answer is complete")
    send("quick")
    page.until(lambda: page.texts() == [*wanted, "quick", answer_to("quick")], "the next turn")
    assert focused == "hello"
    send(f"why?\n\n{quoted(MESSAGE, 'The message replies to this one', ['Bo wrote:', '<b>a boat'])}")
    page.until(lambda: page.texts("#log blockquote") == ["Bo wrote:\n<b>a boat"], "the quoted message of a reply")
    assert page.texts("#log .user .text")[-1] == "why?Bo wrote:\n<b>a boat", "its marks are not shown"


@pytest.mark.long
def test_the_page_has_its_headers(celery_setup: CeleryTestSetup, gateway: GatewayProcess) -> None:
    """Scripts and styles load only from the gateway, framing is forbidden, and each file has an ETag."""
    answer = httpx2.get(gateway.url)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    names = ("chat.js", "api.js", "turn.js", "text.js", "elements.js", "chat.css", "icon.svg")
    for name in (*names, "vendor/markdown-it.esm.min.mjs", "vendor/LICENSE.txt"):
        found = httpx2.get(f"{gateway.url}/chat/{name}")
        assert found.status_code == 200
        again = httpx2.get(f"{gateway.url}/chat/{name}", headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304
        assert "innerHTML" not in found.text
    assert httpx2.get(f"{gateway.url}/chat/../routes.py").status_code == 404
    assert httpx2.get(f"{gateway.url}/chat/nothing.js").status_code == 404


@pytest.mark.browser
def test_with_keys_the_page_asks_for_a_token(
    celery_setup: CeleryTestSetup, installation: Installation, chromium: webdriver.Chrome
) -> None:
    """If the gateway has API keys, the page asks for a user token.

    The page reports an invalid token. A valid token does not enter the page's URL. Leaving removes the token, the draft
    and all else that the page has stored in the browser.
    """
    keys = {
        "PERDURE_API_KEYS": "a-service-key-of-these-tests",
        "PERDURE_SECRET_KEY": "the-secret-of-these-tests-tokens",
    }
    gateway = GatewayProcess(Perdure({**installation.environment, **keys}, installation.directory))
    gateway.start()
    try:
        page = Page(chromium, gateway.url)
        page.size(1280, 800)
        chromium.get(gateway.url)
        page.see("#token").send_keys("nonsense" + Keys.ENTER)
        page.until(lambda: "not a user token" in page.find("#sign-in-why").text, "the reason")
        headers = {"Authorization": f"Bearer {keys['PERDURE_API_KEYS']}"}
        body = {"user_id": "ana", "ttl_s": 600}
        token = httpx2.post(f"{gateway.url}/v1/tokens", json=body, headers=headers).json()["token"]
        page.see("#token").send_keys(token + Keys.ENTER)
        page.see("#text")
        assert page.find("#user").text == "ana"
        page.say("hello")
        page.until(lambda: page.texts() == ["hello", answer_to("hello")], "the answer")
        assert token not in chromium.current_url
        [row] = installation.query("SELECT user_id FROM users")
        assert row.user_id == "ana"
        add_memory(installation.runtime, UserKey("ana"), "The user lives in Lyon.")
        page.find("#known").click()
        page.until(lambda: page.texts("#memory-list .content") == ["The user lives in Lyon."], "the user's memories")
        page.find("#close-memories").click()
        page.find("#text").send_keys("a secret that was not sent")
        kept = "return JSON.stringify([{...localStorage}, {...sessionStorage}])"
        assert "a secret" in chromium.execute_script(kept)
        page.find("#leave").click()
        page.see("#token")
        assert chromium.execute_script(kept) == "[{},{}]"
        assert chromium.execute_script("return document.getElementById('text').value") == ""
    finally:
        gateway.kill()
