"""`perdure turns list` shows all users' turns, newest first. Options select a user, a session or a status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from perdure.access.tenants import UserKey
from perdure.database.tables import TURN_STATUSES
from perdure.models.protocol import ModelCall, ModelReply, ModelRequest, Usage
from perdure.runtime import Runtime
from perdure.turns.cancel import cancel
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure


@pytest.fixture
def turns(runtime: Runtime) -> dict[str, Any]:
    """Four turns in order of acceptance: Ann's done, cancelled and waiting turns, and Bob's waiting turn."""
    runner = Runner(runtime, owner="test")
    made = {"done": accept(runtime, Incoming(user=UserKey("ann"), text="hello"))}
    runner.run(made["done"].session_id)
    made["cancelled"] = accept(runtime, Incoming(user=UserKey("ann"), text="never mind"))
    cancel(runtime, made["cancelled"].turn_id)
    made["waits"] = accept(runtime, Incoming(user=UserKey("ann"), text="and now?"))
    made["bob"] = accept(runtime, Incoming(user=UserKey("bob"), text="hello"))
    runner.close()
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("bob", "waits", "cancelled", "done")),
        (("--limit", "2"), ("bob", "waits")),
        (("--user", "ann"), ("waits", "cancelled", "done")),
        (("--user", "ann", "--status", "accepted"), ("waits",)),
        (("--user", "eve"), ()),
        (("--status", "done"), ("done",)),
        (("--status", "cancelled"), ("cancelled",)),
        (("--status", "failed"), ()),
        (("--status", "accepted"), ("bob", "waits")),
        (("--status", "running"), ()),
        (("--session", "done"), ("waits", "cancelled", "done")),
        (("--session", "done", "--limit", "1"), ("waits",)),
        (("--session", "done", "--user", "bob"), ()),
    ],
)
def test_turns_are_listed_newest_first(
    perdure: Perdure, turns: dict[str, Any], options: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    """Each option narrows the list. Several options are combined with AND."""
    given = [str(turns[each].session_id) if before == "--session" else each for before, each in _pairs(options)]
    listed = perdure("turns", "list", *given, "--json")
    assert listed.returncode == 0, listed.stderr
    assert [each["turn_id"] for each in json.loads(listed.stdout)] == [str(turns[name].turn_id) for name in expected]


def _pairs(options: tuple[str, ...]) -> list[tuple[str, str]]:
    return list(zip(("", *options), options, strict=False))


class Priced:
    """A model of OpenAI, as far as its prices are concerned."""

    name = "openai:gpt-5-mini"

    def __init__(self, *, fallback: bool) -> None:
        used = Usage(1_000_000, 500_000)
        self._reply = ModelReply("hi", usage=used, model="gpt-5-mini-2025-08-07", fallback=fallback)

    def respond(self, request: ModelRequest, call: ModelCall) -> ModelReply:
        return self._reply


class RunPriced(Protocol):
    """Runs a turn with `Priced`; returns a function that runs commands with the variables, and the turn's id."""

    def __call__(self, *, fallback: bool = False, **variables: str) -> tuple[Perdure, str]: ...


@pytest.fixture
def run_priced(runtime: Runtime, environment: Environment, tmp_path: Path) -> RunPriced:
    """A function that runs a turn whose model has a price."""

    def run(*, fallback: bool = False, **variables: str) -> tuple[Perdure, str]:
        asked = accept(runtime, Incoming(user=UserKey("ann"), text="hello"))
        Runner(replace(runtime, models=lambda _: Priced(fallback=fallback)), owner="test").run(asked.session_id)
        return Perdure({**environment, **variables}, tmp_path), str(asked.turn_id)

    return run


@pytest.mark.parametrize(
    ("model", "fallbacks", "fallback", "dollars"),
    [
        ("openai:gpt-5-mini", "", False, "1.25"),
        ("offline", "", False, None),
        ("offline", "anthropic:x,openai:gpt-5-mini", True, "1.25"),
        ("openai:gpt-5-mini", "", True, None),
    ],
)
def test_a_turn_has_its_cost(run_priced: RunPriced, model: str, fallbacks: str, fallback: bool, dollars: str) -> None:
    """`perdure turns show` prints the cost of each reply's model; nothing if a price is unknown."""
    run, turn_id = run_priced(fallback=fallback, PERDURE_MODEL=model, PERDURE_FALLBACK_MODELS=fallbacks)
    shown = run("turns", "show", turn_id, "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["cost_usd"] == dollars
    assert ("cost_usd" in run("turns", "show", turn_id).stdout) is (dollars is not None)


def test_a_cost_needs_the_agents(run_priced: RunPriced) -> None:
    """If the module of agents cannot be imported, the turn is shown without its cost, and the reason is printed."""
    run, turn_id = run_priced(PERDURE_AGENTS="no_such_module")
    shown = run("turns", "show", turn_id, "--json")
    assert (shown.returncode, json.loads(shown.stdout)["cost_usd"]) == (0, None)
    assert "the cost is unknown" in shown.stderr
    assert "no_such_module" in shown.stderr


def test_a_line_has_what_an_operator_looks_for(perdure: Perdure, turns: dict[str, Any]) -> None:
    """Each turn is listed with its ids, user, outcome and times."""
    document = json.loads(perdure("turns", "list", "--status", "cancelled", "--json").stdout)[0]
    assert document == {
        "turn_id": str(turns["cancelled"].turn_id),
        "session_id": str(turns["cancelled"].session_id),
        "tenant": None,
        "user_id": "ann",
        "seq": 2,
        "status": "cancelled",
        "agent": "assistant",
        "channel": "http",
        "attempts": 0,
        "error": {"code": "TURN_CANCELLED", "message": document["error"]["message"]},
        "accepted_at": document["accepted_at"],
        "started_at": None,
        "settled_at": document["settled_at"],
    }
    line = perdure("turns", "list", "--status", "cancelled").stdout.rstrip("\n").split("\t")
    assert line[:6] == [document["turn_id"], document["session_id"], "ann", "cancelled", "0", "TURN_CANCELLED"]


def test_a_wrong_option_lists_the_accepted_values(perdure: Perdure) -> None:
    """A wrong value of an option gives status 2. The message lists the accepted values."""
    for options, named in ((("--status", "lost"), TURN_STATUSES), (("--session", "here"), ("UUID",))):
        ended = perdure("turns", "list", *options)
        assert ended.returncode == 2
        assert all(each in " ".join(ended.stderr.split()) for each in named), ended.stderr


@pytest.mark.long
def test_a_prompt_is_shown(perdure: Perdure, turns: dict[str, Any]) -> None:
    """As text and as JSON. A step that the turn does not have is an error, and so is a turn without a prompt."""
    turn_id = str(turns["done"].turn_id)
    [step] = json.loads(perdure("turns", "prompt", turn_id, "--json").stdout)["steps"]
    assert [each["text"] for each in step["parts"] if each["kind"] == "message"] == ["hello"]
    shown = perdure("turns", "prompt", turn_id, "--step", "1").stdout
    assert step["instructions_hash"] in shown
    assert "message, 2 tokens; user; 1\nhello\n" in shown
    missing = perdure("turns", "prompt", turn_id, "--step", "2")
    assert missing.returncode == 1
    assert "There is no such step" in missing.stderr
    assert json.loads(perdure("turns", "prompt", str(turns["waits"].turn_id), "--json").stdout) == {"steps": []}
