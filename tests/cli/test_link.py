"""`perdure link` creates codes, lists links and removes them."""

from __future__ import annotations

import json

from perdure.access.tenants import user_key
from perdure.cli.errors import Failure
from perdure.runtime import Runtime
from perdure.users.identities import redeem, user_of_identity
from tests.cli.conftest import Perdure
from tests.cli.test_memory import Command, command

__all__ = ["command"]


def test_a_code_links_a_channel(command: Command, runtime: Runtime) -> None:
    """The printed code links a Telegram user to `ana`. The link can be listed and removed."""
    minted = json.loads(command("link", "--user", "ana", "--json").stdout)
    assert minted.keys() == {"code", "expires_at"}
    assert redeem(runtime.database, "telegram", "77:8", minted["code"], None) == "ana"
    listed = json.loads(command("link", "--user", "ana", "--list", "--json").stdout)
    assert [(each["channel"], each["external_id"]) for each in listed] == [("telegram", "77:8")]
    assert "77:8" in command("link", "--user", "ana", "--list").stdout
    assert json.loads(command("link", "--list", "--json").stdout) == []
    removed = json.loads(command("link", "--user", "ana", "--remove", "telegram:77:8", "--json").stdout)
    assert removed == {"channel": "telegram", "external_id": "77:8", "removed": True}
    assert user_of_identity(runtime.database, None, "telegram", "77:8") is None


def test_the_user_is_local_by_default(command: Command, runtime: Runtime) -> None:
    """The default user is `local`, as for `send` and `chat`. The code is on stdout, the instructions are on stderr."""
    result = command("link")
    [code] = [line.split("\t")[1] for line in result.stdout.splitlines() if line.startswith("code\t")]
    assert f"/link {code}" in result.stderr
    assert redeem(runtime.database, "telegram", "1", code, None) == "local"


def test_a_tenants_user_is_linked(command: Command, runtime: Runtime) -> None:
    """With `--tenant` a user of that tenant is linked."""
    code = json.loads(command("link", "--user", "ana", "--tenant", "acme", "--json").stdout)["code"]
    assert redeem(runtime.database, "telegram", "1", code, "acme") == user_key("acme", "ana")
    assert json.loads(command("link", "--user", "ana", "--list", "--json").stdout) == []


def test_wrong_use_is_reported(command: Command) -> None:
    """A malformed link, an unknown link and contradictory options are errors."""
    for options, status in (
        (("--remove", "telegram"), 2),
        (("--remove", "telegram:"), 2),
        (("--remove", "telegram:1"), 1),
        (("--list", "--remove", "telegram:1"), 2),
    ):
        failure = command("link", *options).exception
        assert isinstance(failure, Failure), options
        assert failure.status == status, options


def test_the_command_runs_by_itself(perdure: Perdure) -> None:
    """`perdure link` works in a separate process."""
    done = perdure("link", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["code"].count("-") == 2
