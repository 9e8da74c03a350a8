"""`perdure link`: creates codes that link another channel to a user; lists and removes a user's links."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from perdure.access.tenants import UserKey, parse_tenant, user_key
from perdure.cli import connecting
from perdure.cli.audited import audited
from perdure.cli.connecting import Tenant
from perdure.cli.display import AsJson, write_fields, write_json, write_table, write_text
from perdure.cli.errors import WRONG_USAGE, Failure


@audited("links.mint", notes=("remove",), when=lambda given: not given["list_links"])
def link(
    user: Annotated[str, typer.Option(help="The id of the user.")] = "local",
    tenant: Tenant = None,
    *,
    list_links: Annotated[bool, typer.Option("--list", help="List the user's links instead.")] = False,
    remove: Annotated[
        str | None,
        typer.Option(metavar="CHANNEL:ID", help="Remove a link instead: its channel, and the user's id there."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Link another channel to a user with a one-time code.

    Prints a code. After `/link CODE` is sent from the other channel, messages from that channel belong to this user.
    They then use this user's sessions and memory. A new code replaces the previous code.
    """
    if list_links and remove is not None:
        raise Failure("Pass either --list or --remove.", WRONG_USAGE)
    key = user_key(parse_tenant(tenant), user)
    if remove is not None:
        _remove(key, user, remove, as_json=as_json)
    elif list_links:
        _list(key, as_json=as_json)
    else:
        _mint(key, as_json=as_json)


def _mint(key: UserKey, *, as_json: bool) -> None:
    from perdure.users.identities import VALID_S, mint_code

    with connecting.database() as database:
        minted = mint_code(database, key)
    fields = {"code": minted.code, "expires_at": minted.expires_at.isoformat()}
    if as_json:
        write_json(fields)
        return
    write_fields(fields)
    sys.stderr.write(f"Send `/link {minted.code}` from the other channel within {VALID_S // 60} minutes.\n")


def _list(key: UserKey, *, as_json: bool) -> None:
    from perdure.users.identities import list_links

    with connecting.database() as database:
        links = list_links(database, key)
    rows = [
        {"channel": each.channel, "external_id": each.external_id, "created_at": each.created_at.isoformat()}
        for each in links
    ]
    if as_json:
        write_json(rows)
    else:
        write_table(("channel", "external_id", "created_at"), rows)


def _remove(key: UserKey, user: str, named: str, *, as_json: bool) -> None:
    from perdure.users.identities import remove_link

    channel, colon, external_id = named.partition(":")
    if not (channel and colon and external_id):
        raise Failure(f"{named!r} is not a link: name it as CHANNEL:ID, such as discord:1234.", WRONG_USAGE)
    with connecting.database() as database:
        if not remove_link(database, key, channel, external_id):
            raise Failure(f"{user!r} has no link {named!r}.")
    if as_json:
        write_json({"channel": channel, "external_id": external_id, "removed": True})
    else:
        write_text(f"{named} is no longer linked")
