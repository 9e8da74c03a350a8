"""A wrong setting stops each program with status 2 and a message that names the variable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests import forked
from tests.cli.conftest import Environment

_PATIENCE_S = 30.0

_AGENTS = """
from perdure import Agent
assistant = Agent("assistant", "You help.", {limits})
"""

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture
def run(nowhere: Environment, tmp_path: Path) -> Run:
    """A function that runs a program to its end, with unreachable servers. The result's `stdout` includes stderr."""
    addresses = {"PERDURE_DATABASE_URL": "postgresql://127.0.0.1:1/none", "PERDURE_REDIS_URL": "redis://127.0.0.1:1/0"}
    base = {**nowhere, **addresses, "PYTHONPATH": f"{nowhere['PYTHONPATH']}:{tmp_path}"}

    def run(command: str, **variables: str) -> CompletedProcess[str]:
        output = tmp_path / "output"
        argv = command.split()
        main = {"perdure": "perdure.cli:main", "celery": "celery.__main__:main"}[argv[0]]
        process = forked.start(
            forked.Program(main, argv, {**base, **variables}, tmp_path, stdout=output, stderr=output)
        )
        process.join(_PATIENCE_S)
        status = process.exitcode
        process.kill()
        process.join()
        assert status is not None, f"{command} has not ended:\n{output.read_text()}"
        return CompletedProcess(argv, status, output.read_text())

    return run


WRONG = [
    ("PERDURE_TURN__LEASE_S", "long", "valid number"),
    ("PERDURE_EMBEDDER", "nope:1", "hash:384, openai:NAME"),
    ("PERDURE_EMBEDDER", "hash:many", "hash:N"),
    ("PERDURE_MODEL", "nope", "offline, openai:NAME"),
    ("PERDURE_SUMMARY_MODEL", "nope:1", "offline, openai:NAME"),
    ("PERDURE_FALLBACK_MODELS", "nope:1", "offline, openai:NAME"),
    ("PERDURE_FALLBACK", "nope", "models"),
    ("PERDURE_BREAKER__REGISTRY", "nope", "fleet"),
    ("PERDURE_SNAPSHOTS", "nope", "sqlite:///PATH"),
    ("PERDURE_AGENTS", "no_such_module", "importable module"),
    ("PERDURE_API_KEYS", "sha256:abc", "64 hexadecimal digits"),
    ("PERDURE_REPLY_TASKS", "shop.*@unacked_index", "TASK@QUEUE"),
    ("PERDURE_REPLY_URLS", "hooks.internal", "a network such as"),
    ("PERDURE_WEBHOOK_SECRET", "whsec_short", "base64 of at least 24 bytes"),
    ("PERDURE_ADMIN_KEYS", "a-key-of-16-or-so,sha256:", "64 hexadecimal digits"),
    ("PERDURE_API_KEYS", "acme=fifteen-letters", "16 characters or more"),
    ("PERDURE_ENDPOINTS__VLLM__URL", "localhost:8000", "a URL that begins with http://"),
    ("PERDURE_MODEL_SETTINGS", '{"temperature": "hot"}', "accepted: a number from 0"),
]
SECRET = {"PERDURE_API_KEYS", "PERDURE_ADMIN_KEYS", "PERDURE_WEBHOOK_SECRET", "PERDURE_MODEL_SETTINGS"}
PROGRAMS = ["perdure gateway --port 1", "perdure worker", "perdure up --port 1 --no-flower"]
OTHERS = [
    "perdure beat",
    "perdure flower",
    "perdure send hello",
    "perdure chat",
    "celery -A perdure worker",
    "celery -A perdure beat",
    "celery -A perdure flower",
]


@pytest.mark.parametrize(
    "program", [PROGRAMS[0], *(pytest.param(each, marks=pytest.mark.long) for each in PROGRAMS[1:])]
)
@pytest.mark.parametrize(("name", "value", "accepted"), WRONG, ids=[f"{name}={value}" for name, value, _ in WRONG])
def test_a_wrong_value_stops_the_start(run: Run, program: str, name: str, value: str, accepted: str) -> None:
    """A wrong value stops the program at its start, with a message that names the variable."""
    ended = run(program, **{name: value})

    assert ended.returncode == 2, ended.stdout
    assert name in ended.stdout
    assert accepted in ended.stdout
    assert value in ended.stdout or name in SECRET
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize("program", OTHERS)
def test_every_other_program_refuses_a_wrong_setting(run: Run, program: str) -> None:
    """A wrong setting stops beat, Flower, `send`, `chat` and the programs that `celery` starts."""
    ended = run(program, PERDURE_EMBEDDER="nope:1")

    assert ended.returncode == 2, ended.stdout
    assert "PERDURE_EMBEDDER is 'nope:1': accepted: hash:384" in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ("model='nope:1'", "the model of agent 'assistant' (PERDURE_AGENTS is 'shop') is 'nope:1': accepted: offline"),
        ("model='openai:gpt'", "OPENAI_API_KEY is not set and the model of agent 'assistant'"),
        ("settings={'seed': '1'}", "agent 'assistant' has the setting seed='1'; accepted: a whole number"),
        ("max_steps=0", "agent 'assistant' has max_steps=0; accepted"),
        ("timeout_s=-1", "agent 'assistant' has timeout_s=-1; accepted"),
        ("before_turn=print", "agent 'assistant' has before_turn="),
        ("tools=[undefined]", "PERDURE_AGENTS is 'shop': NameError: name 'undefined' is not defined (shop.py, line 3)"),
        ("tools=[", "PERDURE_AGENTS is 'shop': SyntaxError: "),
    ],
)
def test_a_wrong_agent_stops_the_start(run: Run, tmp_path: Path, limits: str, message: str) -> None:
    """A program does not start if an agent's model, limits, hooks or tools are wrong."""
    (tmp_path / "shop.py").write_text(_AGENTS.format(limits=limits))
    ended = run("perdure up --port 1 --no-flower", PERDURE_AGENTS="shop", OPENAI_API_KEY="")

    assert ended.returncode == 2, ended.stdout
    assert message in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize("variable", ["PERDURE_SUMMARY_MODEL", "PERDURE_FALLBACK_MODELS", "PERDURE_EMBEDDER"])
def test_a_missing_vendors_key_names_the_setting_that_needs_it(run: Run, variable: str) -> None:
    """The message about a missing vendor key names the setting that needs the key."""
    ended = run("perdure worker", OPENAI_API_KEY="", OPENAI_BASE_URL="", **{variable: "openai:small"})

    assert ended.returncode == 2, ended.stdout
    assert f"OPENAI_API_KEY is not set and {variable} is 'openai:small'" in ended.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "variable"),
    [
        ("perdure gateway --port 1", "PERDURE_MODEL"),
        ("perdure gateway --port 1", "PERDURE_FALLBACK_MODELS"),
        ("perdure beat", "PERDURE_MODEL"),
        ("perdure beat", "PERDURE_EMBEDDER"),
        ("celery -A perdure beat", "PERDURE_EMBEDDER"),
    ],
)
def test_programs_without_a_model_need_no_key(run: Run, tmp_path: Path, program: str, variable: str) -> None:
    """Programs that call no model need no vendor's key. In this test they end with 3, because no database exists."""
    (tmp_path / "shop.py").write_text(_AGENTS.format(limits="model='anthropic:claude'"))
    keyless = dict.fromkeys(("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "PERDURE_DATABASE_URL"), "")
    ended = run(program, PERDURE_AGENTS="shop", **{**keyless, variable: "openai:small"})

    assert ended.returncode == 3, ended.stdout
    assert "No PostgreSQL runs in" in ended.stdout


def test_the_gateways_embedder_needs_its_key(run: Run) -> None:
    """The gateway needs the embedder's key, because it embeds search queries."""
    ended = run("perdure gateway --port 1", OPENAI_API_KEY="", OPENAI_BASE_URL="", PERDURE_EMBEDDER="openai:small")

    assert ended.returncode == 2, ended.stdout
    assert "OPENAI_API_KEY is not set and PERDURE_EMBEDDER is 'openai:small'" in ended.stdout


@pytest.mark.parametrize("program", ["perdure gateway --port 1", "perdure up --port 1 --no-flower"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "UTF-8"),
        (b"# keys\nsha256:abc\n", "line 2"),
        (b"a-key-that-is-long\nacme=short\n", "line 2"),
    ],
    ids=["missing", "binary", "malformed", "short"],
)
def test_an_unusable_key_file_stops_its_readers(
    run: Run, tmp_path: Path, program: str, content: bytes | None, message: str
) -> None:
    """An unusable key file stops the gateway and `perdure up`. Otherwise `up` would restart the gateway for ever."""
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    ended = run(program, PERDURE_ADMIN_KEYS=f"file:{path}")

    assert ended.returncode == 2, ended.stdout
    assert f"PERDURE_ADMIN_KEYS names the file {path}" in ended.stdout
    assert message in ended.stdout


_APPLICATION = """
import perdure
from celery import Celery

app = Celery("shop", broker="redis://127.0.0.1:1/0")
perdure.install(app)
"""

UNUSABLE = "/dev/null/perdure"
"""A data directory that no account can create, not even root."""


@pytest.mark.parametrize(
    "program",
    [
        "perdure up --port 1 --no-flower",
        "perdure gateway --port 1",
        "perdure worker",
        "perdure channels",
        "celery -A perdure worker",
        "celery -A application worker -Q turns -P threads -c 2",
    ],
)
def test_a_secret_that_cannot_be_kept_stops_the_start(run: Run, tmp_path: Path, program: str) -> None:
    """A worker that started without the secret would take tasks, and lose the messages in them."""
    (tmp_path / "application.py").write_text(_APPLICATION)
    ended = run(program, PERDURE_DATA_DIR=UNUSABLE)

    assert ended.returncode == 2, ended.stdout
    assert f"PERDURE_SECRET_KEY is not set, and the file that replaces it, {UNUSABLE}/secret.key," in ended.stdout
    assert "PERDURE_DATA_DIR" in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize(
    ("program", "variable", "file"),
    [
        ("perdure worker", "PERDURE_WEBHOOK_SECRET", "webhook.secret"),
        ("celery -A perdure worker", "PERDURE_WEBHOOK_SECRET", "webhook.secret"),
        ("perdure up --port 1", "PERDURE_WEBHOOK_SECRET", "webhook.secret"),
        ("perdure flower --port 1", "FLOWER_BASIC_AUTH", "flower.password"),
        ("celery -A perdure flower --port=1", "FLOWER_BASIC_AUTH", "flower.password"),
    ],
)
def test_each_generated_secret_is_checked(run: Run, program: str, variable: str, file: str) -> None:
    """The message names the variable that makes the file needless."""
    ended = run(program, PERDURE_DATA_DIR=UNUSABLE, PERDURE_SECRET_KEY="a-key-of-sixteen-characters")

    assert ended.returncode == 2, ended.stdout
    assert f"{variable} is not set, and the file that replaces it, {UNUSABLE}/{file}," in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize(
    "program", ["perdure up --port 1 --no-flower", "perdure beat", "celery -A perdure worker", "perdure turns list"]
)
def test_servers_in_an_unusable_directory_are_unavailable(run: Run, program: str) -> None:
    """Without the servers' addresses, the data directory must have them, and the message names it."""
    given = {"PERDURE_SECRET_KEY": "a-key-of-sixteen-characters", "PERDURE_WEBHOOK_SECRET": f"whsec_{'A' * 32}"}
    ended = run(program, PERDURE_DATA_DIR=UNUSABLE, PERDURE_DATABASE_URL="", **given)

    assert ended.returncode == 3, ended.stdout
    assert UNUSABLE in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize("program", ["perdure memory search tea", "perdure send hello", "perdure doctor"])
def test_servers_elsewhere_need_no_directory(run: Run, program: str) -> None:
    """With the servers' addresses, a command needs no data directory. Here no database is at the address."""
    ended = run(program, PERDURE_DATA_DIR=UNUSABLE)

    assert ended.returncode == 3, ended.stdout
    assert "The database cannot be reached" in ended.stdout
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize(
    ("program", "part"),
    [
        ("perdure worker", "perdure.workers.upkeep:start"),
        ("celery -A perdure worker", "perdure.workers.lifecycle:flushers"),
        ("perdure beat", "perdure.observe.presence:Presence.start"),
    ],
)
def test_a_part_that_cannot_be_made_ends_the_process(run: Run, tmp_path: Path, program: str, part: str) -> None:
    """Celery itself only logs an error of a signal's receiver, and would start a worker that fails each task."""
    module, _, name = part.partition(":")
    owner, _, attribute = f"module.{name}".rpartition(".")
    (tmp_path / "shop.py").write_text(
        f"import {module} as module\nfrom perdure import Agent\n\n\ndef fail(*_):\n"
        f"    raise OSError(28, 'No space left on device')\n\n\n{owner}.{attribute} = fail\n"
        "assistant = Agent('assistant', 'You help.')\n"
    )
    ended = run(program, PERDURE_AGENTS="shop")

    assert ended.returncode == 1, ended.stdout
    assert "this process cannot start" in ended.stdout
    assert "No space left on device" in ended.stdout


def test_a_missing_server_is_not_taken_for_a_wrong_setting(run: Run) -> None:
    """If no server runs, the status is 3. Supervisors restart a program after status 3, but not after status 2."""
    ended = run("celery -A perdure beat", PERDURE_DATABASE_URL="")

    assert ended.returncode == 3, ended.stdout
    assert "No PostgreSQL runs in" in ended.stdout
    assert "Traceback" not in ended.stdout
