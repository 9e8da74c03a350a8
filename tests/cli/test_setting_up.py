"""Commands set up the application whose agents they load, as Celery sets it up for a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Environment, Perdure

DJANGO = {
    "shop/__init__.py": "from shop.celery import app as celery_app\n",
    "shop/celery.py": """
import os

import perdure
from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
app = Celery("shop", broker=os.environ.get("PERDURE_REDIS_URL"))
perdure.install(app)
""",
    "shop/settings.py": """
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
USE_TZ = True
""",
    "shop/agents.py": """
from django.contrib.auth.models import User

import perdure

assistant = perdure.Agent("assistant", f"You help each {User._meta.verbose_name}.")
""",
}

LOADER = {
    "shop.py": """
import os

import perdure
from celery import Celery
from celery.loaders.app import AppLoader


class Loader(AppLoader):
    ready = False

    def on_worker_init(self):
        Loader.ready = True


app = Celery("shop", broker=os.environ.get("PERDURE_REDIS_URL"), loader=Loader)
perdure.install(app)
""",
    "helpers.py": """
import shop

import perdure

if not shop.Loader.ready:
    raise RuntimeError("the shop is not set up")
assistant = perdure.Agent("assistant", "You help.")
""",
}

APPLICATIONS: dict[str, tuple[dict[str, str], str, dict[str, str]]] = {
    "Django": (DJANGO, "shop.agents", {}),
    "a loader": (LOADER, "helpers", {}),
}
DJANGO_BY_ENVIRONMENT = (
    {**DJANGO, "shop/__init__.py": "", "shop/celery.py": ""},
    "shop.agents",
    {"DJANGO_SETTINGS_MODULE": "shop.settings"},
)


def _write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@pytest.mark.long
@pytest.mark.parametrize(
    "application",
    [*APPLICATIONS.values(), DJANGO_BY_ENVIRONMENT],
    ids=[*APPLICATIONS, "Django without a Celery application"],
)
def test_a_command_sets_the_application_up(
    perdure: Perdure, environment: Environment, tmp_path: Path, application: tuple[dict[str, str], str, dict[str, str]]
) -> None:
    """Commands load agents that need their application: to decide about a call, and to accept a message."""
    files, agents, more = application
    _write(tmp_path, files)
    env = {**environment, "PERDURE_AGENTS": agents, **more}
    approved = perdure("turns", "approve", "00000000-0000-7000-8000-000000000000", "call_0", env=env)
    assert (approved.returncode, "There is no such turn" in approved.stderr) == (1, True), approved.stderr
    sent = perdure("send", "hello", env=env)
    assert sent.returncode == 0, sent.stderr


@pytest.mark.parametrize("application", APPLICATIONS.values(), ids=APPLICATIONS)
def test_the_doctor_sets_the_application_up(
    perdure: Perdure, environment: Environment, tmp_path: Path, application: tuple[dict[str, str], str, dict[str, str]]
) -> None:
    """`perdure doctor --app` examines an application that must be set up."""
    files, agents, _ = application
    _write(tmp_path, files)
    found = perdure("doctor", "--app", "shop", env={**environment, "PERDURE_AGENTS": agents})
    assert found.returncode in {0, 1}, found.stderr
    assert "Traceback" not in found.stderr


def test_an_application_that_cannot_be_set_up_is_reported(
    perdure: Perdure, environment: Environment, tmp_path: Path
) -> None:
    """The message names the application and the error. Celery itself logs the traceback."""
    _write(tmp_path, {**DJANGO, "shop/settings.py": 'INSTALLED_APPS = ["missing"]\n'})
    ended = perdure("send", "hello", env={**environment, "PERDURE_AGENTS": "shop.agents"})
    assert ended.returncode == 2
    assert "'shop' cannot be set up" in ended.stderr
    assert "missing" in ended.stderr.splitlines()[-1]
