"""Users with the same id in two tenants share no prompts, tool contexts, rate limits, cases or snapshots."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import ToolContext, tool
from perdure.access.tenants import (
    UserKey,
    author_of,
    everybodys,
    line_tenant,
    parse_tenant,
    tenant_of,
    user_key,
    user_of,
)
from perdure.casebank import cases
from perdure.casebank.cases import NewCase
from perdure.errors import InvalidRequest, NotFound, RateLimited
from perdure.settings import CaseScope, GuardSettings
from perdure.snapshots import exchange
from perdure.snapshots.codec import dump, parse
from perdure.turns.feedback import Feedback, give_feedback
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.restore_snapshot import restore
from tests.turns.harness import Harness
from tests.turns.scripted import calls, says, system_text

ACMES, BOLTS, PLAIN = user_key("acme", "ana"), user_key("bolt", "ana"), UserKey("ana")
QUESTION = "how do I reset the router"


def test_a_key_is_made_and_split() -> None:
    """A user key splits into its tenant and its user id. An id that contains the separator is refused."""
    assert len({ACMES, BOLTS, PLAIN}) == 3
    assert [(tenant_of(key), user_of(key)) for key in (ACMES, BOLTS, PLAIN)] == [
        ("acme", "ana"),
        ("bolt", "ana"),
        (None, "ana"),
    ]
    for tenant in ("acme", None):
        with pytest.raises(InvalidRequest, match=r"U\+001F"):
            user_key(tenant, "bolt\x1fana")
    assert [author_of(key) for key in (None, UserKey(""), ACMES, everybodys("acme"))] == [None, "", "ana", None]
    assert tenant_of(everybodys("acme")) == "acme"
    assert [parse_tenant(each) for each in (None, "a", "0-9", "x" * 32)] == [None, "a", "0-9", "x" * 32]
    for wrong in ("", "Acme", "x" * 33, "a b", "ä", "a\x1f", 5, ["acme"]):
        with pytest.raises(InvalidRequest, match="a-z, 0-9 and -"):
            parse_tenant(wrong)
    assert [line_tenant("a", None), line_tenant(None, "a"), line_tenant("a", "a"), line_tenant(None, None)] == [
        "a", "a", "a", None,
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="is bolt, but the file is imported for acme"):
        line_tenant("bolt", "acme")


def test_a_message_is_for_the_tenants_user() -> None:
    """Parsing converts `user_id` to the user key. A message that contains a user key or a tenant is refused."""
    assert parse_incoming({"user_id": "ana", "text": "hi"}, tenant="acme").user == ACMES
    for tenant in ("acme", None):
        with pytest.raises(InvalidRequest, match=r"U\+001F"):
            parse_incoming({"user_id": BOLTS, "text": "hi"}, tenant=tenant)
    with pytest.raises(InvalidRequest, match="tenant"):
        parse_incoming({"user_id": "ana", "text": "hi", "tenant": "acme"})


@tool
def whose(context: ToolContext) -> str:
    """Return the tenant and the user of the turn."""
    return f"{context.tenant}: {context.user_id}"


def test_tools_and_hooks_see_the_plain_id_and_the_tenant(harness: Harness) -> None:
    """Tools and hooks never receive the user key, which combines the tenant and the user id."""
    seen: list[Any] = []
    harness.equip(whose, before_turn=[seen.append], before_tool=[seen.append])
    for user, expected in ((ACMES, "acme: ana"), (PLAIN, "None: ana")):
        harness.script(calls(("whose", {})), says("done"))
        sent = harness.send(user_id=user)
        harness.run(sent.session_id)
        assert ("tool", expected) in harness.lines(sent.session_id)
    assert [(each.tenant, each.user_id) for each in seen] == [("acme", "ana")] * 2 + [(None, "ana")] * 2


def test_nothing_of_another_tenants_user_is_in_a_prompt(harness: Harness) -> None:
    """A prompt contains the user's own messages. A prompt contains no message of another user and no user key."""
    for user, place in ((ACMES, "Lyon"), (BOLTS, "Oslo"), (PLAIN, "Turin")):
        harness.ask(f"my holiday was in {place}", user_id=user)
    for user, place in ((ACMES, "Lyon"), (BOLTS, "Oslo"), (PLAIN, "Turin")):
        harness.ask("where was my holiday?", user_id=user)
        prompt = str(harness.model.requests[-1])
        assert [each for each in ("Lyon", "Oslo", "Turin") if each in prompt] == [place]
        assert "\x1f" not in prompt
        assert "\\x1f" not in prompt


def _bank(harness: Harness) -> str:
    system = system_text(harness.model.requests[-1])
    return next((part for part in system.split("\n\n") if "Answered" in part), "")


@pytest.mark.parametrize("scope", CaseScope)
def test_cases_stay_within_the_tenant(harness: Harness, scope: CaseScope) -> None:
    """A prompt contains no case of another tenant. Users with a tenant and users without a tenant share no cases."""
    changed = harness.settings.casebank.model_copy(update={"scope": scope})
    harness.settings = harness.settings.model_copy(update={"casebank": changed})
    vector = harness.embedder.embed([QUESTION])[0]
    names = {"acme": ACMES, "bolt": BOLTS, "plain": PLAIN}
    for name, user in names.items():
        harness.script(says(f"learnt from {name}"))
        turn = harness.ask(QUESTION, user_id=user)
        give_feedback(harness.runtime, turn["turn_id"], Feedback(score=1))
        author = None if name == "plain" else everybodys(name)
        case = NewCase(
            name, QUESTION, f"imported for {name}", query_vector=vector, embedder=harness.embedder.name, user_id=author
        )
        assert cases.add(harness.database, case, now=harness.clock.now())
    for name, user in names.items():
        for colleague in (user, user.replace("ana", "eve")):
            harness.ask(QUESTION, user_id=colleague)
            bank = _bank(harness)
            assert f"imported for {name}" in bank
            assert (f"learnt from {name}" in bank) == (colleague == user or scope is CaseScope.ALL)
            others = [other for other in names if other != name]
            assert not [other for other in others if f"for {other}" in bank or f"from {other}" in bank], name


def test_a_tenants_shared_case_is_found_without_any_other(harness: Harness) -> None:
    """If a tenant's only case is shared, the tenant's users find the case. Users outside the tenant find no case."""
    vector = harness.embedder.embed([QUESTION])[0]
    case = NewCase(
        "faq", QUESTION, "hold it", query_vector=vector, embedder=harness.embedder.name, user_id=everybodys("acme")
    )
    assert cases.add(harness.database, case, now=harness.clock.now())
    harness.ask(QUESTION, user_id=ACMES)
    assert "hold it" in _bank(harness)
    for other in (BOLTS, PLAIN):
        harness.ask(QUESTION, user_id=other)
        assert _bank(harness) == ""


def test_rates_of_tenants_are_separate(harness: Harness) -> None:
    """Users with the same id in two tenants have separate rate limits."""
    harness.settings = harness.settings.model_copy(update={"guard": GuardSettings(per_minute=1)})
    harness.send(user_id=ACMES)
    harness.send(user_id=BOLTS)
    with pytest.raises(RateLimited):
        harness.send(user_id=ACMES)


def test_a_snapshots_pending_messages_keep_their_tenant(harness: Harness) -> None:
    """An exported pending message contains the tenant and the plain user id.

    An import recognizes a message that was already accepted. If the tenant was changed, the import is refused.
    """
    sent = harness.send("hello", user_id=ACMES, message_id="m1")
    exported = exchange.read(harness.database, sent.session_id)
    [event] = exported.event_queue_backup
    assert isinstance(event.payload, dict)
    assert (event.payload["tenant"], event.payload["user_id"]) == ("acme", "ana")
    text = dump(exported)
    assert "001f" not in text
    assert restore(harness.runtime, parse(text)).known == 1
    for forged in (text.replace('"tenant":', '"_":'), text.replace('"acme"', '"bolt"')):
        assert forged != text
        with pytest.raises(NotFound):
            restore(harness.runtime, parse(forged))
