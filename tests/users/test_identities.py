"""A one-time code links an identity on a channel to a user. The code is valid for a limited time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from sqlalchemy import text

from perdure.access.tenants import UserKey, user_key
from perdure.clock import MovedClock
from perdure.database.engine import Database
from perdure.errors import InvalidRequest, NotFound, RateLimited
from perdure.retention import retain
from perdure.runtime import Runtime
from perdure.users.erase import Eraser
from perdure.users.export import export_user
from perdure.users.identities import (
    MOST_ATTEMPTS,
    VALID_S,
    WINDOW_S,
    list_links,
    mint_code,
    redeem,
    remove_link,
    user_of_identity,
)


@pytest.fixture
def eraser(runtime: Runtime) -> Eraser:
    """An eraser that does not use Redis."""
    return replace(runtime.eraser, redis_memory=None)


def rows(database: Database, table: str) -> int:
    """The number of rows of a table."""
    with database.engine.connect() as connection:
        return int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())  # noqa: S608 (a test's own)


def test_a_code_links_an_identity(database: Database) -> None:
    """Redeeming a code links the redeeming identity, and no other identity, to the user who minted the code."""
    minted = mint_code(database, UserKey("ana"))
    assert user_of_identity(database, None, "telegram", "1") is None
    assert redeem(database, "telegram", "1", minted.code, None) == "ana"
    assert user_of_identity(database, None, "telegram", "1") == "ana"
    assert user_of_identity(database, None, "telegram", "2") is None
    assert user_of_identity(database, None, "discord", "1") is None
    assert user_of_identity(database, "acme", "telegram", "1") is None
    assert [(each.channel, each.external_id) for each in list_links(database, UserKey("ana"))] == [("telegram", "1")]


def test_a_code_may_be_typed_in_several_ways(database: Database) -> None:
    """A code may be typed in lower case, without hyphens, with spaces, or with letters that look like digits."""
    for change in (str.lower, lambda code: code.replace("-", ""), lambda code: f" {code.replace('-', ' ')} "):
        assert redeem(database, "telegram", "1", change(mint_code(database, UserKey("ana")).code), None) == "ana"
    code = mint_code(database, UserKey("ana")).code
    assert redeem(database, "telegram", "1", code.replace("1", "l").replace("0", "o"), None) == "ana"


def test_a_code_is_used_once(database: Database) -> None:
    """If several identities redeem one code concurrently, only one of the identities is linked."""
    code = mint_code(database, UserKey("ana")).code

    def link(number: int) -> bool:
        try:
            return redeem(database, "telegram", str(number), code, None) == "ana"
        except NotFound:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(link, range(8))) == 1
    assert len(list_links(database, UserKey("ana"))) == 1


def test_a_code_expires(database: Database, clock: MovedClock) -> None:
    """An expired code is refused, even before retention deletes the code."""
    code = mint_code(database, UserKey("ana"))
    assert abs((code.expires_at - clock.now()).total_seconds() - VALID_S) < 60
    clock.advance(timedelta(seconds=VALID_S))
    with pytest.raises(NotFound):
        redeem(database, "telegram", "1", code.code, None)


def test_a_new_code_replaces_the_last(database: Database) -> None:
    """A user's new code invalidates the previous code, which may have been shown to the wrong person."""
    first, second = mint_code(database, UserKey("ana")), mint_code(database, UserKey("ana"))
    with pytest.raises(NotFound):
        redeem(database, "telegram", "1", first.code, None)
    assert redeem(database, "telegram", "1", second.code, None) == "ana"


def test_guessing_is_limited(database: Database, clock: MovedClock) -> None:
    """An identity has a limited number of attempts per time window. After that, even a valid code is refused."""
    code = mint_code(database, UserKey("ana")).code
    for _ in range(MOST_ATTEMPTS):
        with pytest.raises(NotFound):
            redeem(database, "telegram", "1", "0000-0000-0000", None)
    for guess in ("0000-0000-0000", code):
        with pytest.raises(RateLimited) as refused:
            redeem(database, "telegram", "1", guess, None)
        assert refused.value.retry_after_s is not None
        assert 0 < refused.value.retry_after_s <= WINDOW_S
    assert redeem(database, "telegram", "2", code, None) == "ana"
    clock.advance(timedelta(seconds=WINDOW_S))
    assert redeem(database, "telegram", "1", mint_code(database, UserKey("ana")).code, None) == "ana"


def test_concurrent_guesses_are_counted(database: Database) -> None:
    """Of 20 concurrent guesses, only `MOST_ATTEMPTS` are compared with the stored codes."""

    def guess(code: str) -> type[Exception]:
        try:
            redeem(database, "telegram", "1", code, None)
        except (NotFound, RateLimited) as error:
            return type(error)
        raise AssertionError(code)

    with ThreadPoolExecutor(8) as pool:
        refused = list(pool.map(guess, repeat("0000-0000-0000", 20)))
    assert refused.count(NotFound) == MOST_ATTEMPTS


def test_a_code_is_not_stored(database: Database) -> None:
    """A copy of the database contains no usable code."""
    code = mint_code(database, UserKey("ana")).code
    with database.engine.connect() as connection:
        dumped = connection.execute(text("SELECT encode(code_hash, 'escape') FROM link_codes")).scalar_one()
    assert code not in dumped
    assert code.replace("-", "") not in dumped


def test_a_link_can_be_moved_and_removed(database: Database) -> None:
    """Redeeming another user's code moves the link to that user. Only the linked user can remove the link."""
    redeem(database, "telegram", "1", mint_code(database, UserKey("ana")).code, None)
    redeem(database, "telegram", "1", mint_code(database, UserKey("bo")).code, None)
    assert user_of_identity(database, None, "telegram", "1") == "bo"
    assert not remove_link(database, UserKey("ana"), "telegram", "1")
    assert remove_link(database, UserKey("bo"), "telegram", "1")
    assert not remove_link(database, UserKey("bo"), "telegram", "1")
    assert user_of_identity(database, None, "telegram", "1") is None


def test_tenants_share_no_identity(database: Database) -> None:
    """A tenant's code is invalid in other tenants. The same external id is a separate identity in each tenant."""
    users = {tenant: user_key(tenant, "ana") for tenant in ("acme", "bolt", None)}
    for tenant, user in users.items():
        code = mint_code(database, user).code
        for other in users.keys() - {tenant}:
            with pytest.raises(NotFound):
                redeem(database, "telegram", "9", code, other)
        assert redeem(database, "telegram", "1", code, tenant) == user
    for tenant, user in users.items():
        assert user_of_identity(database, tenant, "telegram", "1") == user
    assert remove_link(database, users["acme"], "telegram", "1")
    assert user_of_identity(database, "bolt", "telegram", "1") == users["bolt"]


@pytest.mark.parametrize(("channel", "external_id"), [("tele gram", "1"), ("telegram", ""), ("telegram", "a\x00b")])
def test_odd_identities_are_refused(database: Database, channel: str, external_id: str) -> None:
    """`redeem` and `user_of_identity` refuse an invalid channel name or external id. `remove_link` returns False."""
    with pytest.raises(InvalidRequest):
        redeem(database, channel, external_id, "x", None)
    with pytest.raises(InvalidRequest):
        user_of_identity(database, None, channel, external_id)
    assert not remove_link(database, UserKey("ana"), channel, external_id)


@pytest.mark.parametrize("code", ["", "\x00", "\ud800", "x" * 10_000_000, "١٢٣٤-١٢٣٤-١٢٣٤"])
def test_odd_codes_are_wrong(database: Database, code: str) -> None:
    """A malformed code raises `NotFound`, like an unknown code."""
    with pytest.raises(NotFound):
        redeem(database, "telegram", "1", code, None)


def test_links_are_exported_and_erased(database: Database, runtime: Runtime, eraser: Eraser) -> None:
    """A user's export and erasure include the user's links, codes and attempts, but no data of another user."""
    for user in ("ana", "bo"):
        redeem(database, "telegram", user, mint_code(database, UserKey(user)).code, None)
        mint_code(database, UserKey(user))
    with pytest.raises(NotFound):  # without a link, the identity belongs to the user `telegram:7`
        redeem(database, "telegram", "7", "x", None)
    mint_code(database, UserKey("telegram:7"))

    tables = export_user(database, runtime.clock, None, UserKey("ana"))["tables"]
    assert [each["external_id"] for each in tables["identities"]] == ["ana"]
    assert [each["external_id"] for each in tables["link_attempts"]] == ["ana"]
    assert [each.keys() for each in tables["link_codes"]] == [{"user_id", "expires_at"}]
    assert [
        each["external_id"]
        for each in export_user(database, runtime.clock, None, UserKey("telegram:7"))["tables"]["link_attempts"]
    ] == ["7"]
    erased = eraser.erase(UserKey("ana")).rows
    assert (erased["identities"], erased["link_codes"], erased["link_attempts"], erased["users"]) == (1, 1, 1, 1)
    eraser.erase(UserKey("telegram:7"))
    assert {table: rows(database, table) for table in ("identities", "link_codes", "link_attempts")} == dict.fromkeys(
        ("identities", "link_codes", "link_attempts"), 1
    )


def test_an_erased_users_code_is_void(database: Database, eraser: Eraser) -> None:
    """If a code is redeemed during its user's erasure, the erasure completes, and the user is not created again."""
    for number in range(10):
        code = mint_code(database, UserKey("ana")).code

        def link(code: str = code, number: int = number) -> Any:
            try:
                return redeem(database, "telegram", str(number), code, None)
            except NotFound:
                return None

        with ThreadPoolExecutor(2) as pool:
            linking, erasing = pool.submit(link), pool.submit(eraser.erase, UserKey("ana"))
            assert linking.result(20) in {"ana", None}
            erasing.result(20)
        assert list_links(database, UserKey("ana")) == []
        assert rows(database, "users") == 0


def test_expired_codes_and_attempts_are_deleted(database: Database, clock: MovedClock) -> None:
    """Retention deletes expired codes and old attempts, and keeps recent codes and attempts."""
    redeem(database, "telegram", "1", mint_code(database, UserKey("ana")).code, None)
    mint_code(database, UserKey("ana"))
    clock.advance(timedelta(days=2))
    redeem(database, "telegram", "2", mint_code(database, UserKey("bo")).code, None)
    mint_code(database, UserKey("bo"))
    deleted = retain(database)
    assert (deleted["codes that link channels"], deleted["attempts to link channels"]) == (1, 1)
    assert (rows(database, "link_codes"), rows(database, "link_attempts")) == (1, 1)
