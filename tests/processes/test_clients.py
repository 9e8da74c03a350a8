"""Clients of OpenAI's API, as their packages are published, against a real gateway and a real worker without keys.

Each client runs as a program (see `clients`) in an environment that `.ci/clients` installs. perdure does not depend on
the packages.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Perdure
from tests.models.openai_server import Answer
from tests.processes.gateway import serving
from tests.processes.installation import ROOT, Installation
from tests.processes.model_server import HAND_OFF, OF_CLIENT, answer_to
from tests.programs import missing

PROGRAMS = ROOT / ".venv" / "clients" / "bin"
SCRIPTS = Path(__file__).parent / "clients"
CALL = f"{OF_CLIENT}: a"
PLACE = "place"
STORY = " ".join(f"word{number}" for number in range(60))
_PATIENCE_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.parametrize("worker_count", [1])]


@pytest.fixture
def url(celery_setup: object, installation: Installation, perdure: Perdure) -> Iterator[str]:
    """Where the endpoints of a gateway are, whose worker is ready."""
    installation.model_server.answers |= {
        "hello": Answer(STORY, piece=5, interval_s=0.005),
        PLACE: Answer('{"city": "Paris"}'),
    }
    with serving(perdure) as found:
        yield f"{found}/v1"


def _run(*command: str | Path, **environment: str) -> str:
    """Run a program of the clients' environment, and return what it prints."""
    if not (PROGRAMS.parent / "installed").exists():
        missing("the clients are not installed: .ci/clients")
    kept = {each: value for each, value in os.environ.items() if not each.startswith(("PERDURE_", "OPENAI_", "PYTHON"))}
    ran = subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _run_script(name: str, *arguments: str) -> dict[str, Any]:
    found = json.loads(_run(PROGRAMS / "python", SCRIPTS / f"{name}.py", *arguments))
    assert isinstance(found, dict)
    assert found.pop("whole") == STORY
    pieces = found.pop("streamed")
    assert "".join(pieces) == STORY
    assert len(pieces) > 5, "the text arrives in pieces"
    return found


def _check(installation: Installation, turns: int, *users: str) -> None:
    """Assert the number of turns, and that they belong to `users`; the schema of an output has reached the model."""
    installation.check()
    assert [row.status for row in installation.query("SELECT status FROM turns")] == ["done"] * turns
    assert {row.user_id for row in installation.query("SELECT user_id FROM sessions")} == set(users or ("local",))
    asked = [each for each in installation.model_server.server.requests if each["messages"][-1]["content"] == PLACE]
    assert asked
    for each in asked:  # the agent has tools, so the schema is that of one more, which the model must call
        assert each["tool_choice"] == "required"
        assert "city" in each["tools"][-1]["function"]["parameters"]["properties"]


def test_the_sdk_of_openai(url: str, installation: Installation) -> None:
    """The first call needs nothing but the URL. Outputs are parsed on both routes."""
    assert _run_script("openai_sdk", url) == {"output": "Paris", "output of the response": "Paris"}
    _check(installation, 4)


@pytest.mark.exhaustive
def test_langchain(url: str, installation: Installation) -> None:
    """A tool of `bind_tools` is called and its result used in one turn."""
    assert _run_script("langchain", url) == {"called": answer_to(CALL, f"rain for {CALL}"), "output": "Paris"}
    _check(installation, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(url: str, installation: Installation, kind: str) -> None:
    """A `function_tool`, and a handoff to another agent of the client, are each one turn."""
    found = _run_script("openai_agents", url, kind)
    assert found.pop("handed off") == answer_to(HAND_OFF, '{"assistant": "friend"}')
    assert found == {"called": answer_to(CALL, f"rain for {CALL}"), "last": "friend", "output": "Paris"}
    _check(installation, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(url: str, installation: Installation, kind: str) -> None:
    """A tool of an agent in the client's process is called and its result used in one turn."""
    found = _run_script("pydantic_agent", url, kind)
    assert found == {"called": answer_to(CALL, f"rain for {CALL}"), "output": "Paris"}
    _check(installation, 4)


@pytest.mark.exhaustive
def test_litellm(url: str, installation: Installation) -> None:
    """The user, whose member litellm drops, arrives by metadata or by a header."""
    found = _run_script("lite_llm", url)
    assert (found.pop("by metadata"), found.pop("by header")) == (STORY, STORY)
    assert found == {"called": answer_to(CALL, f"rain for {CALL}"), "output": "Paris"}
    _check(installation, 6, "local", "ann", "bob")


@pytest.mark.exhaustive
def test_llm(url: str, installation: Installation, tmp_path: Path) -> None:
    """The command `llm`, streamed and whole, with a conversation that it continues.

    It reads the tokens of each whole answer, also if the model's server has not reported them.
    """
    model = {"model_id": "perdure", "model_name": "tester", "api_base": url, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]), encoding="utf-8")
    installation.model_server.answers["unmetered"] = Answer("Not counted.", usage=None)

    def llm(*arguments: str) -> str:
        return _run(PROGRAMS / "llm", *arguments, LLM_USER_PATH=str(tmp_path)).strip()

    assert llm("-m", "perdure", "hello") == STORY
    assert llm("-m", "perdure", "--no-stream", "unmetered") == "Not counted."
    assert llm("-c", "--no-stream", "hello") == STORY
    assert json.loads(llm("-m", "perdure", "--schema", "city str", PLACE)) == {"city": "Paris"}
    [counted] = [each for each in json.loads(llm("logs", "--json", "-n", "0")) if each["prompt"] == "unmetered"]
    assert counted["input_tokens"] > 0 < counted["output_tokens"]
    assert "estimated" in counted["token_details"]
    _check(installation, 4)
