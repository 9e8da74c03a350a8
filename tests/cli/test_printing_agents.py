"""What the modules of agents print goes to stderr: a command's stdout has the command's own output only."""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.access.tenants import UserKey
from perdure.runtime import Runtime
from perdure.testing import recorded
from perdure.turns.inbox.accept import accept
from perdure.turns.inbox.incoming import Incoming
from perdure.turns.run.loop import Runner
from tests.cli.conftest import Environment, Perdure

AGENTS = """
import sys

from celery import Celery

import perdure

print("a banner")
app = Celery("printing", broker="memory://", set_as_current=False)


def tell(turn):
    print("a hook")


def instruct(context):
    print("instructions")
    return "You help."


assistant = perdure.Agent("assistant", instruct, before_turn=[tell])
"""


@pytest.fixture
def printing(environment: Environment, tmp_path: Path) -> Environment:
    """The environment of a module of agents that prints when it is imported, and in each turn."""
    (tmp_path / "printing.py").write_text(AGENTS)
    return {**environment, "PERDURE_AGENTS": "printing"}


@pytest.fixture
def turn_id(runtime: Runtime) -> str:
    """A turn that is done."""
    runner = Runner(runtime, owner="test")
    accepted = accept(runtime, Incoming(user=UserKey("ann"), text="hello"))
    runner.run(accepted.session_id)
    runner.close()
    return str(accepted.turn_id)


COMMANDS = [
    ("send", "hello", "--json"),
    ("send", "hello", "--wait", "0", "--json"),
    ("usage", "--json"),
    ("memory", "search", "hello", "--user", "ann", "--json"),
    ("doctor", "--json"),
    ("doctor", "--app", "printing", "--json"),
    ("turns", "show", "TURN", "--json"),
    ("turns", "prompt", "TURN", "--json"),
    ("turns", "export", "TURN"),
    ("turns", "cancel", "TURN", "--json"),
    ("drain", "--resume", "--json"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_one_document_is_on_stdout(
    perdure: Perdure, printing: Environment, turn_id: str, command: tuple[str, ...]
) -> None:
    """A program parses what a command prints."""
    ended = perdure(*(turn_id if each == "TURN" else each for each in command), env=printing)
    assert json.loads(ended.stdout), ended.stderr
    assert "a banner" not in ended.stdout
    assert "a banner" in ended.stderr


def test_a_replay_prints_its_findings_only(
    perdure: Perdure, printing: Environment, turn_id: str, tmp_path: Path
) -> None:
    """A replay also runs the hooks and the instructions of the agents."""
    bundle = tmp_path / "bundle.json"
    bundle.write_text(perdure("turns", "export", turn_id, env=printing).stdout)
    assert recorded(bundle).turns
    ended = perdure("turns", "replay", str(bundle), "--json", env=printing)
    assert "departs" in json.loads(ended.stdout), ended.stderr
    assert {"a banner", "a hook", "instructions"} <= {*ended.stderr.splitlines()}


def test_a_chat_over_a_pipe_has_replies_only(perdure: Perdure, printing: Environment) -> None:
    """Without a terminal, each line of stdout belongs to a reply."""
    ended = perdure("chat", "--user", str(uuid4()), stdin="/exit\n", env=printing)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
