"""An installed perdure works with an application whose modules are named `tasks`, `workers` and `schedules`."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import Environment
from tests.cli.test_up import free_ports
from tests.repository.source import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

APPLICATION = {
    "tasks.py": """
from celery import Celery

app = Celery("shop", broker="memory://", set_as_current=True)


@app.task
def answer(expression):
    return 1234
""",
    "workers.py": "OWNER = 'shop'\n",
    "schedules.py": "OWNER = 'shop'\n",
    "shop.py": """
import schedules
import tasks
import workers
from perdure import Agent, tool

assert workers.OWNER == "shop"
assert schedules.OWNER == "shop"


@tool(effect="pure")
def calculator(expression: str) -> str:
    \"\"\"Calculate.\"\"\"
    return str(tasks.answer(expression))


assistant = Agent("assistant", "You calculate.", tools=[calculator])
""",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a wheel built from this checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    (made,) = directory.glob("*.whl")
    return made


@pytest.fixture
def installation(wheel: Path, tmp_path: Path) -> Path:
    """The Python of a virtual environment with the wheel. The dependencies come from the tests' environment."""
    venv.create(tmp_path / "env", with_pip=False)
    libraries = next((tmp_path / "env" / "lib").iterdir()) / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(libraries)
    # Python reads `.pth` files only in its own site-packages, so the checkout's `.pth` file has no effect here.
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return tmp_path / "env" / "bin" / "python"


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """The directory of an application with modules named `tasks`, `workers` and `schedules`."""
    directory = tmp_path / "shop"
    directory.mkdir()
    for name, text in APPLICATION.items():
        (directory / name).write_text(text)
    return directory


def test_the_wheel_installs_one_name(wheel: Path) -> None:
    """The wheel's only top-level package is `perdure`, because another name could hide an application's module."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        modules = set(archive.namelist())
    assert {name for name in names if not name.endswith(".dist-info")} == {"perdure"}
    assert {"perdure/tasks/turns.py", "perdure/workers/celery.py", "perdure/schedules/beat.py"} <= modules
    assert "perdure/migrations/env.py" in modules
    vendored = "perdure/channels/http/pages/static/vendor"
    assert {f"{vendored}/markdown-it.esm.min.mjs", f"{vendored}/LICENSE.txt"} <= modules
    assert any(name.endswith(f".dist-info/licenses/{vendored}/LICENSE.txt") for name in modules)


@pytest.mark.exhaustive
def test_an_installed_perdure_runs_next_to_an_applications_modules(
    installation: Path, application: Path, nowhere: Environment
) -> None:
    """`perdure up` runs in the application's directory. The agent's tool calls the application's module `tasks`."""
    environment = {name: value for name, value in nowhere.items() if name != "PYTHONPATH"}
    environment |= {"PERDURE_AGENTS": "shop", "PERDURE_DATA_DIR": "data"}
    gateway, flower = free_ports(2)

    def perdure(*arguments: str) -> list[str]:
        return [str(installation), "-P", "-m", "perdure.cli", *arguments]

    where = [str(installation), "-P", "-c", "import perdure; print(perdure.__file__)"]
    printed = subprocess.run(where, cwd=application, env=environment, check=True, capture_output=True, text=True)
    assert not Path(printed.stdout.strip()).is_relative_to(ROOT)

    started = subprocess.Popen(
        perdure("up", "--port", str(gateway), "--flower-port", str(flower)),
        cwd=application,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    try:
        lines = []
        for line in started.stdout:
            lines.append(line)
            if "perdure chat" in line:
                break
        else:
            raise AssertionError("".join(lines))
        sent = subprocess.run(
            perdure("send", "what is 12*7+5?", "--wait", "60"),
            cwd=application, env=environment, capture_output=True, text=True, check=False, timeout=90,
        )  # fmt: skip
        assert (sent.returncode, sent.stderr) == (0, "")
        assert "1234" in sent.stdout
    finally:
        started.terminate()
        started.communicate(timeout=60)


@pytest.mark.parametrize("application_name", ["perdure", "workers"])
def test_celery_finds_the_application_in_a_checkout(application_name: str, environment: Environment) -> None:
    """In a checkout, Celery finds the application as `perdure`, and as `workers`."""
    command = [sys.executable, "-m", "celery", "-A", application_name, "report"]
    ended = subprocess.run(
        command, cwd=ROOT, env={**environment, "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "perdure.workers.consumer.consumer:Consumer" in ended.stdout


@pytest.mark.parametrize("linked", [False, True])
def test_the_applications_modules_precede_a_checkout(
    application: Path, nowhere: Environment, tmp_path: Path, *, linked: bool
) -> None:
    """An application's module `tasks` takes precedence over the module `tasks` in a checkout's root."""
    root = ROOT
    if linked:
        root = tmp_path / "checkout"
        root.symlink_to(ROOT)
    environment = {**nowhere, "PYTHONPATH": str(root)}
    code = (
        "import sys; from perdure.cli import _add_working_directory as add; add(); import tasks; print(tasks.__file__)"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=application, env=environment, check=True, capture_output=True, text=True
    )
    assert Path(ended.stdout.strip()) == application / "tasks.py"
