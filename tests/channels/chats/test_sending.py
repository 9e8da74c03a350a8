"""Deliveries to Discord and Slack: long replies, refusals, rate limits and markup."""

from __future__ import annotations

import itertools
import json
import re
from datetime import timedelta
from typing import Any
from uuid import UUID

import hypothesis
import pytest
from hypothesis import strategies as st
from sqlalchemy import text

from perdure.channels.services import configured
from perdure.channels.services import slack as slack_module
from perdure.channels.services.buttons import Buttons
from perdure.channels.services.discord import channel as discord_module
from perdure.channels.services.protocol import Place, Said
from perdure.channels.services.replies import ChatCarrier
from perdure.channels.services.splitting import split
from perdure.clock import MovedClock
from perdure.resilience.registry import Breakers
from perdure.settings import BreakerSettings
from perdure.snapshots.codec import dump, parse
from perdure.snapshots.exchange import read
from perdure.turns.outbox import DeliveryFailed, NotAsked, Undeliverable
from perdure.turns.restore_snapshot import restore
from tests.channels.chats.installation import AllServers, Installation, Servers
from tests.channels.chats.updates import said, slack_event
from tests.channels.discord_server import DiscordServer
from tests.channels.slack_server import SlackServer


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_reply_that_was_cut_off_says_so(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    carrier = ChatCarrier({name: installation.channels[name]}, Buttons([b""]))
    target = {"channel": name, "place": {"chat": "21" if name == "discord" else "D1"}}
    for reason in ("stop", "length"):
        body = json.dumps({"reply": {"text": "Once upon", "stop_reason": reason}}).encode()
        carrier.carry({**target}, body, f"a reply that ended by {reason}")
    server: Any = discord if name == "discord" else slack
    first, second, note = (each["content" if name == "discord" else "text"] for each in server.sent)
    assert (first, second) == ("Once upon", "Once upon")
    assert "cut off" in note


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_long_reply_is_sent_in_parts_once(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """If the second part of a reply fails, the next attempt does not repeat the first part."""
    channel = installation.channels[name]
    carrier = ChatCarrier({name: channel}, Buttons([b""]))
    words = " ".join(str(number) for number in range(2_000))
    body = json.dumps({"reply": {"text": words}}).encode()
    target = {"channel": name, "place": {"chat": "21" if name == "discord" else "D1"}}
    server: Any = discord if name == "discord" else slack
    carrier_calls = 0
    send = channel.send

    def send_but_fail_at_the_second(*given: Any) -> None:
        nonlocal carrier_calls
        carrier_calls += 1
        if carrier_calls == 2:
            server.fail("/messages" if name == "discord" else "chat.postMessage", 500)
        send(*given)

    channel.send = send_but_fail_at_the_second  # type: ignore[method-assign, assignment]
    with pytest.raises(DeliveryFailed, match="500"):
        carrier.carry(target, body, "one delivery")
    carrier.carry(target, body, "one delivery")
    texts = [each["content" if name == "discord" else "text"] for each in server.sent]
    assert all(len(each) <= channel.most_chars for each in texts)
    assert " ".join(texts) == words


def _pending(name: str) -> dict[str, Any]:
    """A call of the tool `name` that waits for approval."""
    return {"call_id": name, "tool": name, "arguments": {}, "approver": "user"}


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
@pytest.mark.parametrize("worker", ["the same worker", "another worker"])
def test_each_request_is_shown_if_another_was_decided_between_attempts(
    three: Installation, every: AllServers, name: str, worker: str
) -> None:
    """The first request is shown and decided, then the second attempt shows the others: the first one has no place."""
    calls = [_pending(f"tool_{number}") for number in range(3)]
    target = {"channel": name, "place": {"chat": "21"}, "asker": "11", "approval": True}
    carriers = [ChatCarrier(three.channels, Buttons([b""])) for _ in range(2)]

    def attempt(carrier: ChatCarrier, *pending: dict[str, Any]) -> None:
        turn = {"turn_id": str(UUID(int=1)), "pending_approvals": pending}
        carrier.carry(target, json.dumps(turn).encode(), "one delivery")

    send, sent = three.channels[name].send, itertools.count(1)

    def send_but_fail_at_the_second(*given: Any, **more: Any) -> None:
        if next(sent) == 2:
            raise DeliveryFailed("answered with status 500", 500)
        send(*given, **more)

    three.channels[name].send = send_but_fail_at_the_second  # type: ignore[method-assign]
    with pytest.raises(DeliveryFailed, match="500"):
        attempt(carriers[0], *calls)
    attempt(carriers[worker == "another worker"], *calls[1:])
    shown = [re.findall(r"tool_[0-9]", text) for text in every.texts()]
    assert shown == [["tool_0"], ["tool_1"], ["tool_2"]]


@pytest.mark.parametrize("name", ["discord", "slack", "telegram"])
def test_a_request_shows_its_arguments_in_their_order(three: Installation, every: AllServers, name: str) -> None:
    """A person approves what is read: no character of an argument shows the others backwards."""
    target = {"channel": name, "place": {"chat": "21"}, "asker": "11", "approval": True}
    turn = {
        "turn_id": str(UUID(int=1)),
        "pending_approvals": [{**_pending("pay"), "arguments": {"account": "\u202e54321\u2066", "to": "שלום"}}],
    }
    ChatCarrier(three.channels, Buttons([b""])).carry(target, json.dumps(turn).encode(), "one delivery")
    [text] = every.texts()
    assert r'"account": "\u202e54321\u2066"' in text
    assert "שלום" in text


def test_a_later_request_does_not_replace_the_first(installation: Installation, discord: DiscordServer) -> None:
    """Only the first message of a delivery replaces the deferred answer to a command, also after a failed attempt."""
    made_ms = int(installation.runtime.clock.now().timestamp() * 1000) - 1_420_070_400_000
    place = {"chat": "21", "message": str(made_ms << 22), "token": "900:tok"}
    target = {"channel": "discord", "place": place, "asker": "11", "approval": True}
    carrier = ChatCarrier(installation.channels, Buttons([b""]))
    first, second = (_pending(each) for each in ("call_0", "call_1"))
    discord.fail("/channels/21/messages", 500)
    discord.acknowledge("tok")
    body = {"turn_id": str(UUID(int=1)), "pending_approvals": [first, second]}
    with pytest.raises(DeliveryFailed):
        carrier.carry(target, json.dumps(body).encode(), "one delivery")
    carrier.carry(target, json.dumps({**body, "pending_approvals": [second]}).encode(), "one delivery")
    assert ["call_0" in each["content"] for each in discord.edited] == [True]
    assert ["call_1" in each["content"] for each in discord.sent] == [True]


def test_discord_deduplicates_for_another_worker(installation: Installation, discord: DiscordServer) -> None:
    """A second worker that repeats a delivery uses the same nonce, so Discord drops the duplicate."""
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    for _ in range(2):
        carrier = ChatCarrier(installation.channels, Buttons([b""]))
        carrier.carry({"channel": "discord", "place": {"chat": "21"}}, body, "one delivery")
    assert len(discord.sent) == 1


FAILURES = [
    ("discord", 429, {"message": "slow down", "retry_after": 7.5, "global": False}, NotAsked),
    ("discord", 403, {"code": 50007, "message": "Cannot send messages to this user"}, Undeliverable),
    ("discord", 404, {"code": 10003, "message": "Unknown Channel"}, Undeliverable),
    ("discord", 400, {"code": 50035, "message": "Invalid Form Body"}, Undeliverable),
    ("discord", 401, {"code": 0, "message": "401: Unauthorized"}, DeliveryFailed),
    ("discord", 500, {}, DeliveryFailed),
    ("slack", 429, {"error": "ratelimited"}, NotAsked),
    ("slack", 200, {"error": "channel_not_found"}, Undeliverable),
    ("slack", 200, {"error": "is_archived"}, Undeliverable),
    ("slack", 200, {"error": "restricted_action_read_only_channel"}, Undeliverable),
    ("slack", 200, {"error": "thread_not_found"}, Undeliverable),
    ("slack", 200, {"error": "a_code_of_tomorrow"}, Undeliverable),
    ("slack", 200, {"error": "invalid_auth"}, DeliveryFailed),
    ("slack", 200, {"error": "token_revoked"}, DeliveryFailed),
    ("slack", 200, {"error": "internal_error"}, DeliveryFailed),
    ("slack", 200, {"error": "ratelimited"}, DeliveryFailed),
    ("slack", 200, {}, DeliveryFailed),
    ("slack", 500, {}, DeliveryFailed),
]


@pytest.mark.parametrize("case", FAILURES, ids=str)
def test_refusals_have_distinct_errors(
    installation: Installation, servers: Servers, case: tuple[str, int, dict[str, Any], type[Exception]]
) -> None:
    """A rate limit raises `NotAsked`, a permanent refusal `Undeliverable`, and any other failure `DeliveryFailed`."""
    name, status, body, error = case
    if name == "discord":
        servers.discord.fail("/messages", status, body, times=9)
    else:
        servers.slack.fail("chat.postMessage", status, body.get("error", ""), times=9, Retry_After="7")
    with pytest.raises(error) as refused:
        installation.channels[name].send(Place("21"), "hello", (), "key")
    assert type(refused.value) is error
    if isinstance(refused.value, NotAsked):
        assert refused.value.retry_s == {"discord": 7.5, "slack": 7.0}[name]


def test_a_short_rate_limit_is_waited_out(installation: Installation, slack: SlackServer) -> None:
    """If Slack limits the rate and asks for a short pause, Slack's library repeats the call once."""
    slack.fail("chat.postMessage", 429, "ratelimited", Retry_After="0")
    installation.channels["slack"].send(Place("D1"), "hello", (), "key")
    assert len(slack.sent) == 1


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_an_unreachable_service_is_a_failed_attempt(
    installation: Installation, discord: DiscordServer, slack: SlackServer, name: str
) -> None:
    """A failed connection raises `DeliveryFailed`, so the delivery is attempted again."""
    dead = "http://127.0.0.1:9/api"
    given = {name: {**installation.runtime.settings.model_dump()[name], "api_url": dead}}
    settings = installation.runtime.settings.model_copy(
        update={name: type(getattr(installation.runtime.settings, name))(**given[name])}
    )
    channel = configured.channels(settings, installation.runtime.clock)[name]
    with pytest.raises(DeliveryFailed):
        channel.send(Place("21"), "hello", (), "key")
    channel.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_services_pause_holds_back_only_its_delivery(
    installation: Installation, slack: SlackServer, *, guarded: bool
) -> None:
    """A service may ask for a pause in one chat only. A breaker that is open holds back all chats of its service."""
    breakers = Breakers(BreakerSettings(failure_threshold=1, cooldown_s=60), MovedClock())
    carrier = ChatCarrier(installation.channels, Buttons([b""]), breakers if guarded else None)
    target = {"channel": "slack", "place": {"chat": "D1"}}
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    slack.fail("chat.postMessage", 429, "ratelimited", times=9, Retry_After="7")
    with pytest.raises(NotAsked) as paused:
        carrier.carry(target, body, "one delivery")
    assert (paused.value.retry_s, paused.value.alone) == (7.0, True)
    if guarded:
        with pytest.raises(NotAsked, match="breaker") as refused:
            carrier.carry(target, body, "another delivery")
        assert not refused.value.alone


def test_a_reply_shows_no_preview_of_its_links(three: Installation, every: AllServers) -> None:
    """For a preview, the service requests the URL, which an injected instruction may have put into the reply."""
    for name, channel in three.channels.items():
        channel.send(Place("21"), "See https://evil.example/?d=the-secret", (), name)
    [on_discord], [on_slack], [on_telegram] = every.discord.sent, every.slack.sent, every.telegram.given("sendMessage")
    assert on_discord["flags"] == 4
    assert (on_slack["unfurl_links"], on_slack["unfurl_media"]) == (False, False)
    assert json.loads(on_telegram["link_preview_options"]) == {"is_disabled": True}


HOSTILE = "<@1> <@&2> <#3> </x:4> <t:5> <:e:6> @everyone **bold** `<@1>` <!channel> <http://evil|bank> &lt; a<b"


def test_discord_shows_mentions_as_text() -> None:
    """Mentions are escaped, except in code, where Discord shows plain text.

    `@everyone` is not escaped, because `allowed_mentions` prevents its notification.
    """
    shown = discord_module.render(HOSTILE)
    assert shown.startswith("\\<@1> \\<@&2> \\<#3> \\</x:4> \\<t:5> \\<:e:6> @everyone **bold** `<@1>`")
    assert shown.endswith("a<b")


def test_discord_shows_code_like_text_as_it_is() -> None:
    """Discord's Markdown would drop the asterisks of a power and the underscores of a name. Addresses are unchanged."""
    for written, shown in (
        ("2**3**4, 2*3*4 and x**2 + y**2", r"2\*\*3\*\*4, 2\*3\*4 and x\*\*2 + y\*\*2"),
        ("`__main__` or __init__, foo__bar", r"`__main__` or \_\_init\_\_, foo\_\_bar"),
        ("https://a.example/b__c__d*2*3", "https://a.example/b__c__d*2*3"),
        ("**bold** *it* **API**s snake_case_name __so bold__", "**bold** *it* **API**s snake_case_name __so bold__"),
    ):
        assert discord_module.render(written) == shown


def test_slack_escapes_its_three_characters() -> None:
    """A model's text cannot mention anyone or hide a link on Slack. The text's Markdown becomes Slack's mrkdwn."""
    shown = slack_module.render(HOSTILE)
    assert "<" not in shown
    assert shown.endswith("&amp;lt; a&lt;b")
    assert "*bold*" in shown
    links = "[here](https://example.com/?a=1&b=2) *it* ~~no~~ `**code**`\n# Title"
    rendered = slack_module.render(links)
    assert rendered == "<https://example.com/?a=1&amp;b=2|here> _it_ ~no~ `**code**`\n*Title*"
    assert slack_module.render("[x](javascript:alert(1))") == "[x](javascript:alert(1))"
    assert slack_module.render("[x](https://a.example/b_(c))") == "<https://a.example/b_(c)|x>"
    for code in ("12*7*5 = 420", "f(*args, **kwargs)", "f(**a,**b) + 2**10**3", "5 * 3 * 2", "f(*a,*b)"):
        assert slack_module.render(code) == code, "asterisks that are no markup"
    nested = "**[x](https://a.example)** ***both*** [**y**](https://a.example) a ~~ b ~~ c\n# The **big** [z](https://b.example)"
    assert slack_module.render(nested) == (
        "*<https://a.example|x>* *_both_* <https://a.example|y> a ~~ b ~~ c\n*The big <https://b.example|z>*"
    )
    assert slack_module.render("*a* 2*3, *b* (**c**), *d e*.") == "_a_ 2*3, _b_ (*c*), _d e_."


def test_headings_within_headings_have_no_depth() -> None:
    """Only the first sign begins a heading, however many follow: a model writes what its user asks for."""
    signs = "# " * 2_000
    assert slack_module.render(f"{signs}a") == f"*{signs.removeprefix('# ')}a*"
    assert slack_module.render(f"**{signs}a**") == f"*{signs}a*"


def test_slacks_markup_is_resolved(installation: Installation) -> None:
    """In a received message, Slack's ids become names, links show their addresses, and escapes are resolved."""
    given = "<@U0BOT> ask <@U2|bo> in <#C1|general> <!here> see <https://a.example|this> &lt;b&gt; &amp;amp;"
    [event] = installation.channels["slack"].parse(slack_event(given))
    assert isinstance(event, Said)
    assert event.text == "ask @bo in #general @here see this (https://a.example) <b> &amp;"


@hypothesis.given(st.text(alphabet=st.sampled_from("ab `\n*"), max_size=2_000), st.integers(100, 400))
def test_parts_are_short_and_lose_no_word(text_: str, most: int) -> None:
    """Each part of a split text is within the limit. Together, the parts keep all text except blanks and backticks."""
    parts = split(text_, most)
    assert all(0 < len(part) <= most for part in parts)
    kept = "".join("".join(parts).split()).replace("`", "")
    assert kept == "".join(text_.split()).replace("`", "")


def test_a_code_block_is_closed_and_opened_again() -> None:
    """A code block that is split is closed in one part and reopened in the next, with its language."""
    code = "\n".join(f"line {number}" for number in range(60))
    parts = split(f"Look:\n```python\n{code}\n```\nDone.", 200)
    assert len(parts) > 2
    assert all(part.count("```") % 2 == 0 for part in parts)
    assert all(part.startswith("```python\n") for part in parts[1:-1])
    assert parts[-1].endswith("Done.")


@pytest.mark.long
def test_a_restored_message_is_answered_in_its_chat(installation: Installation, servers: Servers) -> None:
    """A pending message that is exported and imported is accepted once and answered in its original chat."""
    installation.ingress("discord").take(said("what is 12*7+5?"))
    [row] = installation.sql("SELECT session_id FROM sessions")
    snapshot = parse(dump(read(installation.runtime.database, row.session_id)))
    assert restore(installation.runtime, snapshot).known == 1
    with installation.runtime.database.engine.connect() as connection:
        connection.execute(text("TRUNCATE turns, inbox CASCADE"))
        connection.execute(text("UPDATE sessions SET unsettled = 0, last_turn_seq = 0"))
    assert restore(installation.runtime, snapshot).accepted == 1
    installation.work()
    assert "89" in servers.discord.sent[0]["content"]


def test_a_malformed_place_is_a_dead_letter(installation: Installation) -> None:
    """A malformed target, for example from another release, fails permanently, because no attempt can succeed."""
    carrier = ChatCarrier(installation.channels, Buttons([b""]))
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    for target in ({"channel": "telex"}, {"channel": "discord"}, {"channel": "discord", "place": {"where": "here"}}):
        with pytest.raises(Undeliverable):
            carrier.carry(target, body, "one delivery")


@pytest.mark.parametrize("code", ["restricted_action_thread_locked", "is_inactive", "a_code_of_tomorrow"])
def test_a_refusal_by_one_chat_of_slack_is_no_failure_of_slack(
    installation: Installation, slack: SlackServer, code: str
) -> None:
    """Whatever the reason is that a chat refuses a message, the breaker stays closed for all other chats."""
    breakers = Breakers(BreakerSettings(failure_threshold=1), MovedClock())
    carrier = ChatCarrier(installation.channels, Buttons([b""]), breakers)
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    slack.fail("chat.postMessage", 200, code)
    with pytest.raises(Undeliverable, match=code):
        carrier.carry({"channel": "slack", "place": {"chat": "C1"}}, body, "refused")
    carrier.carry({"channel": "slack", "place": {"chat": "D1"}}, body, "another")
    assert [each["channel"] for each in slack.sent] == ["D1"]


@pytest.mark.parametrize("name", ["discord", "slack"])
def test_a_failing_service_opens_its_breaker(installation: Installation, servers: Servers, name: str) -> None:
    """Repeated failures of a service open its breaker, and attempts stop. Refusals by a chat are not failures."""
    clock = MovedClock()
    breakers = Breakers(BreakerSettings(failure_threshold=2, cooldown_s=60), clock)
    carrier = ChatCarrier(installation.channels, Buttons([b""]), breakers)
    body = json.dumps({"reply": {"text": "hello"}}).encode()
    target = {"channel": name, "place": {"chat": "21"}}
    server: Any = servers.discord if name == "discord" else servers.slack
    path = "/messages" if name == "discord" else "chat.postMessage"

    if name == "discord":
        server.fail(path, 403, {"code": 50007, "message": "Cannot send messages to this user"}, times=5)
    else:
        server.fail(path, 200, "channel_not_found", times=5)
    for number in range(5):
        with pytest.raises(Undeliverable):
            carrier.carry(target, body, f"refused {number}")
    server.fail(path, 500, times=2)
    for _ in range(2):
        with pytest.raises(DeliveryFailed, match="500"):
            carrier.carry(target, body, "one delivery")
    with pytest.raises(NotAsked):
        carrier.carry(target, body, "one delivery")
    assert server.sent == []
    clock.advance(timedelta(seconds=61))
    carrier.carry(target, body, "one delivery")
    assert len(server.sent) == 1
