"""Stores, uses, reads and deletes files. A content is stored once for each tenant.

A content of at most `row_bytes` bytes, and any content without `PERDURE_FILES__URL`, is stored in rows, in one
transaction with its first file. A greater one is an object, written between two commits: the first records where it
will be, and that it is deleted in an hour; the second keeps it and gives it a file. A process that is killed between
the two leaves an object that `collect` deletes.

The last file of a content takes the content with it: erasures and `collect` lock the contents of the files that they
delete, then look for other files. Storing a content again locks it, too, so neither sees half of the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import Row
from sqlalchemy.exc import IntegrityError

from perdure.access.tenants import UserKey, tenant_of
from perdure.clock import Clock
from perdure.database.engine import Database, Transaction
from perdure.errors import InvalidRequest, NotFound, TooLarge, Unavailable
from perdure.files import objects, queries
from perdure.files.fetching import Fetching
from perdure.files.kinds import Kind
from perdure.files.parts import FilePart
from perdure.files.results import File, describe_result
from perdure.files.spool import Spool
from perdure.ids import new_id
from perdure.settings import FileSettings
from perdure.text.untrusted import first_line

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
"""The bytes of a row with a piece of a content, and of a piece that is read."""

UNUSED_S = 86_400
"""Seconds after which a file that no message has is deleted."""

_TRIES = 5
_WRITING_S = 3_600
_MOST = 100


@dataclass(frozen=True, slots=True)
class Owner:
    """The user that a file is for, or only the tenant: a message of any of its users may then use the file."""

    tenant: str | None
    user: UserKey | None

    @classmethod
    def of(cls, user: UserKey) -> Owner:
        return cls(tenant_of(user), user)


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored file."""

    file_id: UUID
    media_type: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a tool that returns a file, and its session."""

    effect_id: UUID
    session_id: UUID

    def file_id(self, content: Spool, name: str | None) -> UUID:
        """The id of its file: the same if the call runs again after a crash, so that the file is stored once."""
        return uuid5(self.effect_id, f"{content.sha256.hex()} {name}")


class Files:
    """The files of an installation. Thread-safe. Each method raises `Unavailable` if the database cannot be reached."""

    def __init__(self, database: Database, settings: FileSettings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self.fetching = Fetching()

    def spool(self) -> Spool:
        """An empty content, to be written and stored."""
        return Spool(self._settings.max_bytes)

    def put(
        self,
        content: Spool,
        owner: Owner,
        *,
        named: str | None = None,
        name: str | None = None,
        of_call: Call | None = None,
    ) -> Stored:
        """Store a file. `named` is the media type that its sender gave, and `name` its name.

        `of_call` is the call of the tool that returned the file, which is then kept although no message has it.

        Raises:
            InvalidRequest: the content is empty, damaged, or would grow too large; see `kind_of`. Or the user of the
                call was erased.
            TooLarge: the user has too many files.
            ProviderError: the object cannot be written.
        """
        kind = content.kind(named)
        given = {
            "file_id": new_id(self._clock) if of_call is None else of_call.file_id(content, name),
            "tenant": owner.tenant or "",
            "user_id": owner.user,
            "media_type": kind.media_type,
            "name": name,
            "session_id": None if of_call is None else of_call.session_id,
            "sha256": content.sha256,
            **self._content(content, kind),
        }
        self._require_room(given)
        for _ in range(_TRIES):
            try:
                if self._store(given, content):
                    return Stored(given["file_id"], kind.media_type, content.size, content.sha256.hex())
            except IntegrityError:  # the content was stored or deleted concurrently
                log.debug("a content is being stored or deleted concurrently; retrying")
        raise Unavailable("The same file is being stored and deleted; please try again.")

    def attach(self, user: UserKey, call: Call, file: File) -> str:
        """Store a file that a call returns; returns the line that describes it.

        Raises:
            InvalidRequest, TooLarge, ProviderError: as `put`.
        """
        name = None if file.name is None else first_line(file.name, 200)
        with self.spool() as content:
            content.write(file.data)
            stored = self.put(content, Owner.of(user), named=file.media_type, name=name, of_call=call)
        return describe_result(self.rows([stored.file_id])[stored.file_id])

    def _content(self, content: Spool, kind: Kind) -> dict[str, Any]:
        content_id = new_id(self._clock)
        is_object = self._settings.url is not None and content.size > self._settings.row_bytes
        place = f"{str(self._settings.url).rstrip('/')}/{content_id.hex[-2:]}/{content_id.hex}" if is_object else None
        size = {"size": content.size, "width": kind.width, "height": kind.height, "pages": kind.pages}
        return {"content_id": content_id, "place": place, **size}

    def _require_room(self, given: Mapping[str, Any]) -> None:
        most = self._settings.user_bytes
        if given["user_id"] is None or not most:
            return
        [stored] = self._database.run(queries.STORED_BYTES, given)
        if stored.size + given["size"] > most:
            raise TooLarge(
                f"The user's files have {stored.size:,} bytes; at most {most:,} are kept (PERDURE_FILES__USER_BYTES)."
            )

    def _store(self, given: dict[str, Any], content: Spool) -> bool:
        """Give a new file its content, which may be stored already. Returns False if it changed concurrently."""
        if given["place"] is None:
            return self._in_transaction(given, lambda transaction: self._add_rows(transaction, given, content))
        if self._in_transaction(given, lambda _: False):
            return True
        self._database.run(queries.ADD_CONTENT, {**given, "delete_after_s": _WRITING_S})
        objects.write(given["place"], content.pieces(PIECE_BYTES))
        return self._in_transaction(given, lambda transaction: bool(transaction.run(queries.KEEP_CONTENT, given)))

    def _in_transaction(self, given: dict[str, Any], add: Callable[[Transaction], bool]) -> bool:
        with self._database.transaction("files.store") as transaction:
            if given["session_id"] is not None and not transaction.run(queries.LOCK_SESSION, given):
                raise InvalidRequest("The user was erased, so no file can be stored for them.")
            found = transaction.run(queries.FIND_CONTENT, given)
            if not found and not add(transaction):
                return False
            content_id = found[0].content_id if found else given["content_id"]
            transaction.run(queries.ADD_FILE, {**given, "content_id": content_id})
        return True

    @staticmethod
    def _add_rows(transaction: Transaction, given: dict[str, Any], content: Spool) -> bool:
        if not transaction.run(queries.ADD_CONTENT, {**given, "delete_after_s": None}):
            return False
        for number, data in enumerate(content.pieces(PIECE_BYTES)):
            transaction.run(queries.ADD_CHUNK, {"content_id": given["content_id"], "number": number, "data": data})
        return True

    def find(self, file_id: UUID, may_see: Callable[[str, UserKey | None], bool]) -> Row[Any]:
        """The row of a file. `may_see` gets the file's tenant and user.

        Raises:
            NotFound: there is no such file, or `may_see` returns False.
        """
        rows = self._database.run(queries.READ, {"file_ids": [file_id]})
        if not rows or not may_see(rows[0].tenant, rows[0].user_id):
            raise NotFound("There is no such file.")
        return rows[0]

    def rows(self, file_ids: Iterable[UUID]) -> dict[UUID, Row[Any]]:
        """The rows of the files that still exist."""
        wanted = list(dict.fromkeys(file_ids))
        return {row.file_id: row for row in self._database.run(queries.READ, {"file_ids": wanted})} if wanted else {}

    def read(self, row: Row[Any], most: int | None = None) -> bytes:
        """The bytes of a file, or the first `most` of them. `row` is from `rows`.

        Raises:
            NotFound: the file was deleted in between.
            ProviderError: its object cannot be read.
        """
        return b"".join(self.pieces(row, most))

    def pieces(self, row: Row[Any], most: int | None = None) -> Iterator[bytes]:
        """As `read`, in pieces of at most `PIECE_BYTES` bytes."""
        until = row.size if most is None else min(row.size, most)
        for start in range(0, until, PIECE_BYTES):
            end = min(start + PIECE_BYTES, until)
            if row.place is not None:
                yield objects.read(row.place, start, end)
                continue
            chunk = {"content_id": row.content_id, "number": start // PIECE_BYTES}
            found = self._database.run(queries.CHUNK, chunk)
            if not found:
                raise NotFound("The file was deleted.")
            yield bytes(found[0].data)[: end - start]

    def collect(self) -> int:
        """Delete the files that no message has, and the objects that no file has. Returns how many were deleted.

        Safe to repeat, and to run concurrently.

        Raises:
            ProviderError: an object cannot be deleted; the next round tries again.
        """
        with self._database.transaction("files.delete_unused") as transaction:
            unused = transaction.run(queries.DELETE_UNUSED, {"unused_s": UNUSED_S, "most": _MOST})
            release(transaction, [row.content_id for row in unused])
        due = self._database.run(queries.DUE_OBJECTS, {"most": _MOST})
        for row in due:
            objects.delete(row.place)
            self._database.run(queries.FORGET_CONTENT, {"content_id": row.content_id})
        return len(unused) + len(due)


def take_in(files: Files, user: UserKey, parts: Sequence[FilePart]) -> list[UUID]:
    """Store the files of a message that are not stored yet; returns the ids of all of them.

    If the message is not accepted, they are deleted after a day.

    Raises:
        InvalidRequest, TooLarge: a file cannot be used; the message names it.
        RateLimited: too many files are being read from URLs.
        ProviderError: an object cannot be written.
    """
    found = list[UUID]()
    for number, part in enumerate(parts, start=1):
        if part.file_id is not None:
            found.append(part.file_id)
            continue
        try:
            with files.spool() as content:
                if part.url is not None:
                    files.fetching.fetch(part.url, user, content)
                else:
                    content.write_base64(part.data or "")
                found.append(files.put(content, Owner.of(user), named=part.media_type, name=part.name).file_id)
        except (InvalidRequest, TooLarge) as error:
            raise type(error)(f"parts: the {part.type} {number} of the message: {error.message}") from None
    return found


def use(
    transaction: Transaction, clock: Clock, user: UserKey, session_id: UUID, file_ids: Sequence[UUID]
) -> list[Row[Any]]:
    """Mark the files `file_ids` as used by a message of `user` in this transaction; returns their rows in this order.

    They are deleted with the session, unless a message of another session uses them later.

    Raises:
        NotFound: the user has no such file.
    """
    given = {
        "user_id": user,
        "tenant": tenant_of(user) or "",
        "session_id": session_id,
        "file_ids": list(file_ids),
        "new_ids": [new_id(clock) for _ in file_ids],
    }
    rows = list(transaction.run(queries.USE, given))
    missing = set(range(1, len(file_ids) + 1)) - {row.position for row in rows}
    if missing:
        raise NotFound(f"file_id: this user has no file {file_ids[min(missing) - 1]}.")
    return rows


def release(transaction: Transaction, content_ids: Sequence[UUID]) -> int:
    """Delete those of `content_ids` that no file has any more; returns their number. `collect` deletes the objects."""
    if not content_ids:
        return 0
    given = {"content_ids": list(content_ids)}
    transaction.run(queries.LOCK_CONTENTS, given)
    return int(transaction.run(queries.RELEASE_CONTENTS, given)[0].gone)
