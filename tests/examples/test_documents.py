"""The snippets of four documents run verbatim, in their order: in processes with servers, a worker and a gateway.

What a document calls the reader's own (an application's table, a function that finds a session) is in a module or in
lines before the snippet. `8080` is replaced by the test's port.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from perdure import Agent
from perdure.database.engine import Database
from perdure.testing import Scripted, ask, call
from tests.cli.test_readme import Command, steps
from tests.cli.test_up import free_ports
from tests.databases import ORDINARY, Databases
from tests.examples.conftest import QUEUES, ROOT, Example
from tests.files.contents import png
from tests.models.openai_server import Answer, Call, OpenAIServer, Wire
from tests.processes.faults import wait_until

EXAMPLE = "celery"

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

SHOP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]

engine = create_engine(os.environ["PERDURE_DATABASE_URL"])
Base.metadata.create_all(engine)
"""
"""The reader's application in `docs/sending.md` and `docs/files.md`."""

ANSWER = "It rains, so take one."


def _answer(body: Wire) -> Answer:
    """The model: calls the client's tool once, if there is one."""
    if body["messages"][-1]["role"] != "tool" and any(each["function"]["name"] == "weather" for each in _tools(body)):
        return Answer(calls=[Call("weather", "{}", "call_1")])
    return Answer(ANSWER)


def _tools(body: Wire) -> list[Any]:
    return list(body.get("tools") or ())


class Reader:
    """Somebody who saves the snippets of a document and types its commands in one directory."""

    def __init__(self, example: Example, model: OpenAIServer, directory: Path) -> None:
        self.example, self.model, self.directory = example, model, directory
        directory.mkdir()
        example.directory = directory
        example.environment |= {
            "PERDURE_MODEL": "openai:test",
            "OPENAI_BASE_URL": model.base_url,
            "OPENAI_API_KEY": "none",
            "PYTHONPATH": f"{directory}:{ROOT}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "KEY": "none",
        }
        [self._port] = free_ports(1)

    def serve(self) -> None:
        """Start perdure's worker and gateway, as `make up` does."""
        self.example.worker("perdure", QUEUES)
        self.example.start("perdure.cli:main", "perdure", "gateway", "--port", str(self._port))
        url = f"http://127.0.0.1:{self._port}/healthz"
        wait_until(lambda: _is_served(url), "the gateway is served")

    def save(self, name: str, text: str) -> None:
        """Save a module."""
        (self.directory / name).write_text(text.replace("8080", str(self._port)), encoding="utf-8")

    def run(self, text: str) -> str:
        """Run a snippet as a script, to its end. Returns what it prints."""
        self.save("snippet.py", text)
        return self.type("python snippet.py")

    def type(self, line: str) -> str:
        """Run a command to its end. It must succeed. Returns what it prints."""
        ran = subprocess.run(
            ["bash", "-c", line.replace("8080", str(self._port))], cwd=self.directory, env=self.example.environment,
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, (line, ran.stdout, ran.stderr)
        return ran.stdout


def _read(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def _is_served(url: str) -> bool:
    try:
        return httpx2.get(url).is_success
    except httpx2.TransportError:
        return False


def snippets(name: str) -> list[str]:
    """The snippets of a document, and its commands without their outputs, in their order."""
    return [each.line if isinstance(each, Command) else each for each in steps(name)]


@pytest.fixture
def reader(example: Example, tmp_path: Path) -> Iterator[Reader]:
    """A reader whose model is a test's server."""
    with OpenAIServer(player=_answer) as model:
        yield Reader(example, model, tmp_path / "reader")


@pytest.fixture
def shop_role(databases: Databases, database: Database) -> Iterator[None]:
    """The role of the application in `docs/sending.md`."""
    databases.administer("DROP ROLE IF EXISTS shop")
    databases.administer(f"CREATE ROLE shop ROLE {ORDINARY}")
    yield
    with database.engine.connect() as connection:
        connection.exec_driver_sql("DROP OWNED BY shop")
    databases.administer("DROP ROLE shop")


@pytest.mark.exhaustive
def test_the_document_on_the_openai_routes(reader: Reader) -> None:
    """Both snippets print the answer. The commands that start Open WebUI need its package."""
    asking, calling, *commands = snippets("docs/openai.md")
    assert [each.split()[0] for each in commands] == ["export", "export", "open-webui"]
    exported = reader.type(" && ".join([*commands[:2], 'echo "$OPENAI_API_CONFIGS"'])).strip()
    assert json.loads(exported)["0"]["headers"] == {"X-OpenWebUI-Task": "{{TASK}}"}
    reader.serve()
    assert reader.run(asking).strip() == ANSWER
    assert reader.run(calling).strip() == ANSWER
    brought = [each["content"] for each in reader.model.requests[-1]["messages"] if each["role"] == "tool"]
    assert brought == ["It rains."], "the model gets the result of the client's tool"


@pytest.mark.exhaustive
def test_the_documents_on_sending_and_on_files(reader: Reader, shop_role: None) -> None:
    """The application sends a text, then a file; the console uploads one; a tool makes one."""
    sending, granting = snippets("docs/sending.md")
    uploading, posting, sending_a_file, drawing = snippets("docs/files.md")
    reader.save("shop.py", SHOP)
    for name in ("cat.png", "photo.png"):
        (reader.directory / name).write_bytes(png(4, 3))
    reader.serve()
    assert reader.run(sending).strip() == ANSWER
    assert "shop may insert messages" in reader.type(granting)

    file_id = json.loads(reader.type(uploading))["file_id"]
    shown = re.search(r'"file_id": "([\w-]+)"', posting)
    assert shown is not None
    turn_id = json.loads(reader.type(posting.replace(shown[1], file_id)))["turn_id"]
    turn = json.loads(reader.type(f"curl 'http://127.0.0.1:8080/v1/turns/{turn_id}?wait=30'"))
    assert turn["reply"]["text"] == ANSWER
    assert _pictures(reader.model.requests[-1]) == 1

    before = len(reader.model.requests)
    within = "from sqlalchemy.orm import Session\nfrom shop import engine\nsession = Session(engine)\n"
    reader.run(f"{within}{sending_a_file}session.commit()\n")
    reader.model.wait_for_requests(before + 1)
    assert _pictures(reader.model.requests[-1]) == 2

    namespace: dict[str, Any] = {"draw": lambda _what: png(4, 3), "__name__": "document"}
    exec(compile("import perdure\n" + drawing, "files.md", "exec", dont_inherit=True), namespace)  # noqa: S102 (the repository's own document)
    answer = ask(
        Agent("assistant", "You draw.", [namespace["chart"]]),
        "Draw.",
        model=Scripted(call("chart", what="tea"), "Done."),
    )
    assert "[image: chart.png, image/png, 4 by 3 pixels" in str(answer.calls[0].result)


def _pictures(body: Wire) -> int:
    contents = [each["content"] for each in body["messages"] if isinstance(each["content"], list)]
    return sum(part["type"] == "image_url" for content in contents for part in content)


@pytest.mark.exhaustive
def test_the_document_on_your_own_application(reader: Reader) -> None:
    """The application of the first snippet runs with its workers and beat; its gateway is mounted in two frameworks."""
    installing, *commands, mounting, in_django, approving = snippets("docs/in-your-application.md")
    example = reader.example
    broker = example.environment["PERDURE_REDIS_URL"]
    assert "redis://localhost:6379/0" in installing
    reader.save("shop.py", installing.replace("redis://localhost:6379/0", broker))
    migrating, *starting = (shlex.split(each, comments=True) for each in commands)
    reader.type(shlex.join(migrating))
    *workers, _beat = [example.start("celery.__main__:main", *command) for command in starting]
    wait_until(lambda: all("[queues]" in _read(log) for log in workers), "both workers have started")
    assert len({each for log in workers for each in re.findall(r"- (\S+@\S+) v", _read(log))}) == 2, "two names"

    own = "async def session_of(request):\n    return type('User', (), {'id': request.headers['x-user']})\n\n"
    reader.save("service.py", own + mounting)
    settings = "from django.conf import settings\nsettings.configure(ROOT_URLCONF=(), ALLOWED_HOSTS=['*'])\n"
    reader.save("asgi.py", f"{settings}from service import agents\n{in_django}")
    for application in ("service:app", "asgi:application"):
        url = f"{example.serve(application)}/agents/v1"
        with httpx2.Client(headers={"x-user": "ana"}, timeout=40) as client:
            turn_id = client.post(f"{url}/messages", json={"text": "hello"}).json()["turn_id"]
            assert client.get(f"{url}/turns/{turn_id}?wait=30").json()["reply"]["text"] == ANSWER

    person = "type('Person', (), {'is_staff': True, 'limit': 500})"
    people = f"objects = type('Objects', (), {{'get': lambda self, pk: {person}}})()\n"
    asked = "print(may_approve('ana', {'user_id': 'bob', 'arguments': {'cents': 400}}))\n"
    known = f"import perdure\nfrom service import customer\nclass Person:\n    {people}"
    assert reader.run(known + approving + asked).strip() == "True"
