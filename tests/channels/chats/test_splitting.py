"""A reply of any length and any text arrives whole, in messages that each service accepts."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.channels.services import slack, telegram_markup
from perdure.channels.services.buttons import Buttons
from perdure.channels.services.discord import channel as discord
from perdure.channels.services.protocol import Button, Channel, Place
from perdure.channels.services.replies import ChatCarrier
from perdure.channels.services.slack import Slack
from perdure.channels.services.splitting import split, units
from perdure.channels.services.telegram import Telegram
from perdure.clock import SystemClock
from perdure.turns.outbox import Undeliverable
from tests.channels.chats.installation import Installation
from tests.channels.chats.updates import said
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer
from tests.channels.telegram_server import SECRET, TOKEN, TelegramServer

LIMITS = {"telegram": 4_096, "discord": 2_000, "slack": 3_000}
"""The services' published limits: of a message's shown text, of a message, and of a section."""

SENT = {
    "telegram": lambda part: html.unescape(re.sub(r"</?[a-z]+[^>]*>", "", telegram_markup.render(part))),
    "discord": discord.render,
    "slack": slack.render,
}

FAMILY, FLAG, TONE, ACCENT = "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "e\u0301"
BLOCKS = st.sampled_from([
    "word ", "a longer sentence of words. ", "\n", "\n\n", "`code` ", "**bold** ", "snake_case_name ", "2*3*4 ",
    "<@1> ", "<#2> ", "<@&3>", "&amp; ", "<b>", "[link](https://a.example/x?a=1&b=2) ", "- item\n", "> quote\n",
    "```python\nprint('x')\n```\n", "```\n", "| a | b |\n|---|---|\n| 1 | long cell of a table |\n", "# Title\n",
    FAMILY, FLAG, TONE, ACCENT, "שלום עולם ", "مرحبا ", "漢字" * 9, "x" * 90, "\u202eabc\u202c ",
])  # fmt: skip
TEXTS = st.lists(st.tuples(BLOCKS, st.integers(1, 90)), min_size=1, max_size=25).map(
    lambda chosen: "".join(block * number for block, number in chosen)
)


@pytest.fixture(scope="module")
def channels() -> Iterator[dict[str, Channel]]:
    """Channels that are not connected. Discord counts as its class does."""
    made: dict[str, Any] = {
        "telegram": Telegram(TOKEN, SECRET, None),
        "discord": discord.Discord,
        "slack": Slack("xoxb-1", "s" * 32, None, None, SystemClock()),
    }
    yield made
    made["telegram"].close()
    made["slack"].close()


def _length(channels: dict[str, Channel], name: str, text: str) -> int:
    return units(discord.render(text)) if name == "discord" else channels[name].length(text)


@pytest.mark.long
@pytest.mark.parametrize("name", LIMITS)
@settings(max_examples=50)
@given(text=TEXTS)
def test_each_part_is_accepted_and_nothing_is_lost(channels: dict[str, Channel], name: str, text: str) -> None:
    """Counted as sent, in UTF-16. All parts have closed code blocks, and no emoji, flag or accent is cut."""
    most = channels[name].most_chars
    assert most <= LIMITS[name]
    parts = split(text, most, lambda given: _length(channels, name, given))
    assert all(units(SENT[name](part)) <= LIMITS[name] for part in parts)
    assert _bare("".join(parts)) == _bare(text)
    for part in parts[1:]:
        first = part.removeprefix("```\n")[:1]
        assert first not in {"\u200d", "🏽"}
        assert not unicodedata.combining(first or " ")
    for before, after in pairwise(parts):
        assert not before.endswith("\u200d")
        flags = len(before) - len(before.rstrip("🇩🇪"))
        assert flags % 2 == 0 or not after.startswith(("🇩", "🇪"))


@pytest.mark.parametrize(("text", "shown"), [("a word ", 1), ("# a\n", 1), ("<@1>", 2)])
def test_a_long_text_is_measured_in_linear_time(text: str, shown: int) -> None:
    """The measured characters grow as the text does. To measure is slow: it makes the service's markup.

    `shown`: how long the service's markup makes a character.
    """
    measured: list[int] = []

    def length(given: str) -> int:
        measured.append(len(given))
        return shown * len(given)

    for chars in (20_000, 80_000):
        measured.clear()
        parts = split(text * (chars // len(text)), 4_000, length)
        assert len(parts) < 1.1 * shown * chars / 4_000 + 1
        assert sum(measured) < 20 * chars


def _bare(text: str) -> str:
    """A text without blanks, and without fences and their languages, which a part may repeat."""
    return re.sub(r"```(?:python)?|\s", "", text)


def test_escapes_are_counted(installation: Installation, discord: DiscordServer) -> None:
    """Text of the greatest length that grows by its escapes takes two messages, not one that is refused."""
    text = ("<@1>" * 20 + "word " * 400)[:1_990]
    carrier = ChatCarrier(installation.channels, Buttons([b""]))
    carrier.carry({"channel": "discord", "place": {"chat": "21"}}, json.dumps({"reply": {"text": text}}).encode(), "k")
    assert len(discord.sent) == 2
    assert all(len(each["content"]) <= 2_000 for each in discord.sent)


def test_the_escapes_of_an_answer_to_a_command_are_counted(installation: Installation, discord: DiscordServer) -> None:
    """A list of conversations whose titles grow by their escapes is cut to what the service accepts."""
    installation.ingress("discord").take(said("hello"))
    installation.sql(
        "INSERT INTO conversations (user_id, conversation, title, created_at)"
        " SELECT user_id, 'c' || n, repeat('<@1>', 20), now() FROM users, generate_series(1, 20) AS n RETURNING 1"
    )
    installation.ingress("discord").take(said("/list"))
    [listed] = [each["content"] for each in discord.sent if "conversation of this chat" in each["content"]]
    assert 1_000 < len(listed) <= 2_000


@pytest.mark.parametrize("name", ["discord", "slack"])
@pytest.mark.parametrize("refusals", [1, 2])
def test_a_refused_form_is_sent_plainly_and_else_reported(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str, refusals: int
) -> None:
    """First without markup; if that is refused, too, the person is told, and the delivery is a dead letter."""
    if name == "discord":
        discord.fail("/messages", 400, {"code": 50035, "message": "Invalid Form Body"}, times=refusals)
    else:
        slack.fail("chat.postMessage", 200, "invalid_blocks", times=refusals)
    carrier = ChatCarrier(installation.channels, Buttons([b""]))
    target = {"channel": name, "place": {"chat": "21" if name == "discord" else "D1"}}
    body = json.dumps({"reply": {"text": "see **this**"}}).encode()
    if refusals == 1:
        carrier.carry(target, body, "k")
    else:
        with pytest.raises(Undeliverable):
            carrier.carry(target, body, "k")
    server: Any = discord if name == "discord" else slack
    [shown] = [each["content" if name == "discord" else "text"] for each in server.sent]
    plain = r"see \*\*this\*\*" if name == "discord" else "see **this**"
    assert shown.replace("\\.", ".") == (plain if refusals == 1 else shown)
    assert ("could not be shown" in shown) is (refusals == 2)


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("# Title\nHello **bold _nested_** ~~gone~~", "<b>Title</b>\n\nHello <b>bold <i>nested</i></b> <s>gone</s>"),
        ("snake_case 2*3*4 a * b __init__ 5 < 6 & 7", "snake_case 2*3*4 a * b __init__ 5 &lt; 6 &amp; 7"),
        ("2**3**4, x**2 + y**2, f(*args, **kwargs)", "2**3**4, x**2 + y**2, f(*args, **kwargs)"),
        ("the **API**s and ***both***", "the <b>API</b>s and <i><b>both</b></i>"),
        ("这是**重要**的", "这是<b>重要</b>的"),
        ("- a\n  - b\n\n3. x\n4. y", "• a\n  • b\n\n3. x\n4. y"),
        ("[x](https://a.example/?a=1&b=2) [j](javascript:x)", '<a href="https://a.example/?a=1&amp;b=2">x</a> [j](javascript:x)'),  # noqa: E501
        ("| a | b |\n|---|---|\n| 1 | **two** |", "<pre>a  b\n1  two</pre>"),
        ("> quoted\n\n`<i>`", "<blockquote>quoted</blockquote>\n\n<code>&lt;i&gt;</code>"),
        ("```c++\na < b\n", '<pre><code class="language-c++">a &lt; b</code></pre>'),
        ("**open", "**open"),
        ("<b>no</b> &lt;", "&lt;b&gt;no&lt;/b&gt; &amp;lt;"),
        ("see [1]\n\n[1]: https://a.example\n[^2]: note", "see [1]\n\n[1]: https://a.example\n[^2]: note"),
        ("    - a\n    - b\n- c\n    - d\n    - e", "• a\n• b\n• c\n  • d\n  • e"),
        ("      deep\n\n    less\n\n3. x\n\n    of x", "deep\n\nless\n\n3. x\nof x"),
    ],
)  # fmt: skip
def test_telegram_shows_markdown(markdown: str, shown: str) -> None:
    """What Telegram has no markup for keeps its meaning as text; what only looks like Markdown stays as it is."""
    assert telegram_markup.render(markdown) == shown


def test_a_nested_list_of_several_messages_stays_a_list(channels: dict[str, Channel]) -> None:
    """A part may begin with the items of a nested list, whose indentation would make them code."""
    text = "\n".join(f"- item {n} {'x' * 40}\n    - sub {n} a\n    - sub {n} b" for n in range(90))
    shown = [telegram_markup.render(each) for each in split(text, 4_096, channels["telegram"].length)]
    assert len(shown) > 1
    assert [each for each in shown if "<pre>" in each or "- " in each] == []
    assert sum(each.count("•") for each in shown) == 270


@given(TEXTS)
def test_telegrams_html_is_well_formed(text: str) -> None:
    """Every element is closed in order, so that Telegram accepts the text."""
    open_: list[str] = []
    for closing, tag in re.findall(r"<(/?)([a-z]+)[^>]*>", telegram_markup.render(text)):
        if closing:
            assert open_.pop() == tag
        else:
            open_.append(tag)
    assert open_ == []


def test_a_reply_follows_its_group_to_the_supergroup() -> None:
    """Telegram answers with the new id, and the reply is sent there."""
    server = TelegramServer()
    channel = Telegram(TOKEN, SECRET, server.url)
    server.fail("sendMessage", 400, description="upgraded", parameters={"migrate_to_chat_id": -1009})
    channel.send(Place("-9", group=True), "hello", [Button("Yes", "y")], "k")
    [sent] = server.given("sendMessage")
    assert (sent["chat_id"], sent["text"]) == ("-1009", "hello")
    channel.close()
    server.close()
