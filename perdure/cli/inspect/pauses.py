"""`perdure pause` and `perdure resume`: turns of a tenant, a user or an agent wait, or run again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.display import AsJson, write_json, write_table, write_text
from perdure.cli.errors import WRONG_USAGE, Failure

if TYPE_CHECKING:
    from perdure.access.tenants import UserKey

Tenant = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Of this tenant.")]
User = Annotated[str | None, typer.Option(help="Of this user.")]
Agent = Annotated[str | None, typer.Option(help="Of this agent.")]

_COLUMNS = ("tenant", "user_id", "agent", "paused_at")


def _begins(given: Mapping[str, Any]) -> bool:
    return not given["dry_run"] and any(given[part] for part in ("tenant", "user", "agent"))


class _Parts(TypedDict):
    tenant: str | None
    user: UserKey | None
    agent: str | None


@audited("pauses.begin", notes=("tenant", "agent"), when=_begins)
def pause(
    tenant: Tenant = None,
    user: User = None,
    agent: Agent = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the turns that would wait.")] = False,
    as_json: AsJson = False,
) -> None:
    """Accept messages of a tenant, user or agent, and let them wait.

    Turns that are running continue. With several options, only turns to which all apply wait. Without options, the
    command lists the pauses.
    """
    from perdure.turns import pauses

    parts = _parts(tenant, user, agent)
    with connecting.database() as database:
        if not any(parts.values()):
            found = pauses.list_pauses(database)
            if as_json:
                write_json(found)
            else:
                write_table(_COLUMNS, found)
            return
        if not dry_run:
            pauses.pause(database, **parts)
        turns = pauses.count(database, **parts)
    if as_json:
        write_json({"paused": not dry_run, "turns": turns})
    else:
        write_text(f"{turns} unsettled turns {'would wait' if dry_run else 'wait, unless they are running'}")


@audited("pauses.end", notes=("tenant", "agent"))
def resume(tenant: Tenant = None, user: User = None, agent: Agent = None, *, as_json: AsJson = False) -> None:
    """End a pause: what has waited runs."""
    from perdure.turns import pauses

    parts = _parts(tenant, user, agent)
    if not any(parts.values()):
        raise Failure("Pass --tenant, --user or --agent, as with `perdure pause`.", WRONG_USAGE)
    with connecting.database() as database:
        if not pauses.resume(database, **parts):
            raise Failure("There is no such pause. `perdure pause` lists the pauses.")
        turns = pauses.count(database, **parts)
    if as_json:
        write_json({"paused": False, "turns": turns})
    else:
        write_text(f"{turns} unsettled turns run, unless another pause applies to them")


def _parts(tenant: str | None, user: str | None, agent: str | None) -> _Parts:
    key, named = connecting.parse_user(user, tenant)
    return {"tenant": named, "user": key, "agent": agent}
