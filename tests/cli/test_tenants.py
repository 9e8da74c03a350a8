"""Commands with `--tenant` keep the users of different tenants apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.access.tenants import user_key
from perdure.cli.errors import Failure
from perdure.errors import InvalidRequest, NotFound
from perdure.runtime import Runtime
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import parse_incoming
from perdure.turns.run.loop import Runner
from tests.cli.test_memory import Command, command

__all__ = ["command"]

PLACES = {"acme": "Lyon", "bolt": "Oslo", None: "Turin"}


@pytest.fixture
def anas(runtime: Runtime) -> dict[str | None, str]:
    """The session ids by tenant. In each session, the tenant's user `ana` has sent a message."""
    runner = Runner(runtime, owner="test")
    sessions: dict[str | None, str] = {}
    for tenant, place in PLACES.items():
        message = {"user_id": "ana", "text": f"my holiday was in {place}", "message_id": "m"}
        sent = accept(runtime, parse_incoming(message, tenant=tenant))
        runner.run(sent.session_id)
        sessions[tenant] = str(sent.session_id)
    runner.close()
    return sessions


def _json(command: Command, *arguments: str) -> Any:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return json.loads(result.stdout)


def _of(tenant: str | None) -> tuple[str, ...]:
    return () if tenant is None else ("--tenant", tenant)


@pytest.mark.parametrize("group", ["sessions", "turns"])
def test_lists_are_narrowed_to_a_tenant(command: Command, anas: dict[str | None, str], group: str) -> None:
    """`--tenant` and `--user` narrow a list. Without these options, the list has all users, with their tenants."""

    def listed(*options: str) -> set[tuple[str | None, str, str]]:
        found = _json(command, group, "list", *options)
        return {(each["tenant"], each["user_id"], each["session_id"]) for each in found}

    everybody = {(tenant, "ana", session_id) for tenant, session_id in anas.items()}
    assert listed() == everybody
    for tenant, session_id in anas.items():
        assert listed("--user", "ana", *_of(tenant)) == {(tenant, "ana", session_id)}
    assert listed("--tenant", "acme") == {("acme", "ana", anas["acme"])}
    assert listed("--tenant", "none") == set()
    assert "acme" in command(group, "list").stdout
    assert isinstance(command(group, "list", "--tenant", "ACME").exception, InvalidRequest)
    assert isinstance(command(group, "list", "--user", "acme\x1fana").exception, InvalidRequest)


def test_sessions_given_up_are_narrowed_to_a_tenant(
    command: Command, runtime: Runtime, anas: dict[str | None, str]
) -> None:
    """`--tenant` narrows `sessions list --given-up`."""
    with runtime.database.engine.connect() as connection:
        connection.exec_driver_sql("UPDATE sessions SET consolidation_given_up_at = now()")
    found = _json(command, "sessions", "list", "--given-up", "--tenant", "bolt")
    assert [each["session_id"] for each in found] == [anas["bolt"]]


@pytest.mark.usefixtures("anas")
def test_memory_commands_are_limited_to_a_tenants_user(command: Command) -> None:
    """Memories are searched, exported and erased by tenant and user. The output never shows the stored user key."""
    for tenant, place in PLACES.items():
        found = command("memory", "search", "where was my holiday", "--user", "ana", *_of(tenant), "--json").stdout
        whole = command("memory", "export", "--user", "ana", *_of(tenant)).stdout
        for text in (found, whole):
            assert [each for each in PLACES.values() if each in text] == [place]
            assert "001f" not in text
            assert "\x1f" not in text
        assert json.loads(whole)["user_id"] == "ana"
    assert _json(command, "memory", "forget", "--all", "--user", "ana", "--tenant", "acme")["rows"]["turns"] == 1
    gone = command("memory", "export", "--user", "ana", "--tenant", "acme")
    assert isinstance(gone.exception, NotFound)
    assert command("memory", "export", "--user", "ana").exit_code == 0


@pytest.mark.usefixtures("anas")
def test_messages_are_exported_and_imported_by_tenant(command: Command, tmp_path: Path) -> None:
    """Exported lines contain the user's tenant. An import with `--tenant` assigns the tenant to lines without one."""

    def exported(*options: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in command("messages", "export", *options).stdout.splitlines()]

    assert {(each.get("tenant"), each["user_id"]) for each in exported()} == {(tenant, "ana") for tenant in PLACES}
    assert {each.get("tenant") for each in exported("--tenant", "acme")} == {"acme"}
    assert {each.get("tenant") for each in exported("--user", "ana")} == {None}
    [question, answer] = exported("--user", "ana", "--tenant", "acme")
    assert "Lyon" in question["content"]
    everything = tmp_path / "all.jsonl"
    everything.write_text(command("messages", "export").stdout)
    assert _json(command, "messages", "import", str(everything))["known"] == 6
    of_acme, plain = tmp_path / "acme.jsonl", tmp_path / "plain.jsonl"
    of_acme.write_text(json.dumps(question) + "\n")
    plain.write_text(json.dumps({**answer, "tenant": None, "session": "s"}) + "\n")
    refused = command("messages", "import", str(of_acme), "--tenant", "bolt", "--json")
    assert isinstance(refused.exception, Failure)
    assert json.loads(refused.stdout)["bad"] == [
        {"line": 1, "reason": "tenant: is acme, but the file is imported for bolt."}
    ]
    assert _json(command, "messages", "import", str(plain), "--tenant", "bolt")["added"] == 1
    assert len(exported("--tenant", "bolt")) == 3


def test_cases_are_exported_and_imported_by_tenant(command: Command, tmp_path: Path) -> None:
    """Cases keep their tenant in exports and imports. A case whose id exists in another tenant is refused."""
    file = tmp_path / "cases.jsonl"
    lines = [
        {"case_id": "shared", "query": "reset the router", "response_text": "hold it"},
        {"case_id": "anas", "query": "boil an egg", "response_text": "six minutes", "user_id": "ana"},
        {"case_id": "nobodys", "query": "boil another egg", "response_text": "nine minutes", "user_id": ""},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _json(command, "cases", "import", str(file), "--tenant", "acme")["added"] == 3
    assert _json(command, "cases", "import", str(file), "--tenant", "acme")["unchanged"] == 3
    for other in ("bolt", None):
        refused = json.loads(command("cases", "import", str(file), *_of(other), "--json").stdout)
        assert (refused["added"], refused["unchanged"], refused["refused"]) == (0, 0, 3)
        assert "another tenant" in refused["bad"][0]["reason"]
    listed = _json(command, "cases", "list", "--tenant", "acme")
    assert [(each["case_id"], each["tenant"], each["user_id"]) for each in listed] == [
        ("anas", "acme", "ana"),
        ("nobodys", "acme", ""),
        ("shared", "acme", None),
    ]
    assert _json(command, "cases", "show", "shared")["tenant"] == "acme"
    assert _json(command, "cases", "list", "--tenant", "bolt") == []
    found = [_json(command, "cases", "search", "egg", *_of(tenant))["results"] for tenant in ("acme", "bolt", None)]
    assert [len(each) for each in found] == [3, 0, 3]
    assert {each["tenant"] for each in found[0]} == {"acme"}
    out = command("cases", "export", "--tenant", "acme").stdout
    assert [json.loads(line)["tenant"] for line in out.splitlines()] == ["acme"] * 3
    file.write_text(out)
    assert _json(command, "cases", "import", str(file))["unchanged"] == 3
    assert command("cases", "export", "--tenant", "bolt").stdout == ""


def test_a_message_is_sent_for_a_tenants_user(command: Command, runtime: Runtime) -> None:
    """The same user id and message id in two tenants identify two messages."""
    sent = [_json(command, "send", "hi", "--user", "ana", "--message-id", "m", *_of(tenant)) for tenant in PLACES]
    assert [each["duplicate"] for each in sent] == [False] * 3
    again = _json(command, "send", "hi", "--user", "ana", "--message-id", "m", "--tenant", "acme")
    assert (again["duplicate"], again["turn_id"]) == (True, sent[0]["turn_id"])
    foreign = command("send", "hi", "--user", "ana", "--tenant", "bolt", "--session", sent[0]["session_id"])
    assert isinstance(foreign.exception, NotFound)
    with runtime.database.engine.connect() as connection:
        users = connection.exec_driver_sql("SELECT user_id FROM users ORDER BY created_at").scalars().all()
    assert users == [user_key(tenant, "ana") for tenant in PLACES]
