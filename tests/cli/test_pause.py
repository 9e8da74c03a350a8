"""`perdure pause` and `perdure resume`."""

from __future__ import annotations

import json

from perdure.access.tenants import user_key
from perdure.runtime import Runtime
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.lease.claim import Queued
from perdure.turns.reading import read_turn
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Perdure


def test_a_tenants_user_is_paused_and_resumed(perdure: Perdure, runtime: Runtime) -> None:
    """The commands count what waits, list the pauses, and end one that is named as it was made."""
    sent = accept(runtime, Incoming(user=user_key("acme", "ann"), text="hello"))
    whom = ("--tenant", "acme", "--user", "ann")
    dry = perdure("pause", *whom, "--dry-run", "--json")
    assert json.loads(dry.stdout) == {"paused": False, "turns": 1}
    assert perdure("pause", "--json").stdout == "[]\n"
    assert json.loads(perdure("pause", *whom, "--json").stdout) == {"paused": True, "turns": 1}
    assert Runner(runtime, "test").run(sent.session_id) == Queued()
    (listed,) = json.loads(perdure("pause", "--json").stdout)
    assert (listed["tenant"], listed["user_id"], listed["agent"]) == ("acme", "ann", None)

    other = perdure("resume", "--tenant", "acme")
    assert (other.returncode, "no such pause" in other.stderr) == (1, True)
    assert perdure("resume").returncode == 2
    assert perdure("resume", *whom).stdout == "1 unsettled turns run, unless another pause applies to them\n"
    assert perdure("pause", "--json").stdout == "[]\n"


def test_all_turns_of_a_tenant_are_cancelled(perdure: Perdure, runtime: Runtime) -> None:
    """A dry run counts them. Those of others wait on."""
    sent = [accept(runtime, Incoming(user=user_key("acme", name), text="hello")) for name in ("ann", "bob")]
    other = accept(runtime, Incoming(user=user_key(None, "ann"), text="hello"))
    whom = ("turns", "cancel", "--tenant", "acme")
    assert json.loads(perdure(*whom, "--dry-run", "--json").stdout) == {"cancelled": False, "turns": 2}
    assert perdure(*whom, "--user", "bob").stdout == "1 unsettled turns are cancelled\n"
    assert json.loads(perdure(*whom, "--json").stdout) == {"cancelled": True, "turns": 1}
    assert [read_turn(runtime.database, each.turn_id)["status"] for each in sent] == ["cancelled"] * 2
    assert read_turn(runtime.database, other.turn_id)["status"] == "accepted"
    assert perdure("turns", "cancel").returncode == 2
    assert perdure("turns", "cancel", str(other.turn_id), "--user", "ann").returncode == 2
