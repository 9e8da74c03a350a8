"""`.env` sets perdure's variables and vendors' variables such as `OPENAI_API_KEY`. Mistakes in it are reported."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from perdure.errors import SettingsError
from perdure.settings import Settings
from tests.cli.conftest import Environment, Perdure


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of the test. Vendors' variables are unset before the test, and restored after it."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "FLOWER_BASIC_AUTH", "OTHER_KEY"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_vendors_variables_reach_the_environment(directory: Path) -> None:
    """Vendors' variables in `.env` are copied to `os.environ`, which SDKs and Flower read. Other names are ignored."""
    (directory / ".env").write_text(
        "OPENAI_API_KEY=from-file\nexport ANTHROPIC_API_KEY='quoted'\nFLOWER_BASIC_AUTH=a:b\nOTHER_KEY=x\n"
    )
    Settings.load()

    names = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "FLOWER_BASIC_AUTH", "OTHER_KEY")
    assert [os.environ.get(name) for name in names] == ["from-file", "quoted", "a:b", None]


def test_the_environment_takes_precedence(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment takes precedence over `.env`. An empty variable counts as unset."""
    (directory / ".env").write_text("OPENAI_API_KEY=from-file\nOPENAI_BASE_URL=http://127.0.0.1:9/v1\n")
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    monkeypatch.setenv("OPENAI_BASE_URL", "")
    Settings.load()

    assert (os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]) == (
        "from-environment",
        "http://127.0.0.1:9/v1",
    )


def test_a_misspelt_name_is_reported(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Misspelt names in `.env` are logged, like misspelt names in the environment."""
    (directory / ".env").write_text("PERDURE_MODLE=openai:gpt\nPERDURE_MODEL=offline\nPERDURE_TURN__LEASE=9\n")
    with caplog.at_level(logging.WARNING):
        Settings.load()

    reported = [record.getMessage().split()[0] for record in caplog.records]
    assert reported == ["PERDURE_MODLE", "PERDURE_TURN__LEASE"]


def test_a_value_for_a_group_is_reported(directory: Path) -> None:
    """A value for a whole group of settings is an error that names one of the group's settings."""
    (directory / ".env").write_text("PERDURE_TURN=long\n")
    with pytest.raises(SettingsError, match="PERDURE_TURN is a group: set PERDURE_TURN__MAX_STEPS"):
        Settings.load()


def test_a_file_that_is_not_text_is_reported(directory: Path) -> None:
    """A `.env` that is not UTF-8 text raises `SettingsError` with a message, instead of a library's error."""
    (directory / ".env").write_bytes(b"PERDURE_MODEL=\xff\xfe\n")
    with pytest.raises(SettingsError, match=r"\.env cannot be read.*UTF-8"):
        Settings.load()


def test_a_key_in_the_file_is_the_sdks(perdure: Perdure, nowhere: Environment, tmp_path: Path) -> None:
    """A worker accepts a vendor's key from `.env`. The worker then fails only because no server runs."""
    (tmp_path / ".env").write_text("PERDURE_MODEL=openai:gpt-5\n")
    bare = {name: value for name, value in nowhere.items() if not name.startswith("OPENAI_")}
    assert "OPENAI_API_KEY is not set" in perdure("worker", env=bare).stderr

    with (tmp_path / ".env").open("a") as file:
        file.write("OPENAI_API_KEY=from-file\n")
    ended = perdure("worker", env=bare)
    assert (ended.returncode, "No Redis runs in" in ended.stderr) == (3, True), ended.stderr
