"""Grants an application's role the rights on perdure's tables that `perdure.send` needs."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError

from perdure.database.schema import quoted
from perdure.database.session import maintenance_engine
from perdure.errors import InvalidRequest, Unavailable
from perdure.text.untrusted import first_line


def grant_sending(database_url: str | URL, schema: str, role: str) -> None:
    """Grant `role` the rights to insert messages with `perdure.send`, and no other rights. Idempotent.

    Raises:
        InvalidRequest: there is no such role, or the role in `database_url` may not grant the rights.
    """
    engine = maintenance_engine(database_url)
    named = quoted(role).replace(":", "\\:")
    within = quoted(schema).replace(":", "\\:")
    try:
        with engine.begin() as connection:
            connection.execute(text(f"GRANT USAGE ON SCHEMA {within} TO {named}"))
            columns = "turn_id, user_id, message"
            connection.execute(text(f"GRANT INSERT ({columns}) ON {within}.unrouted TO {named}"))
    except OperationalError as error:
        raise Unavailable(f"The rights cannot be granted: {first_line(str(error.orig))}") from error
    except DBAPIError as error:
        raise InvalidRequest(f"--grant {role}: {first_line(str(error.orig))}") from error
    finally:
        engine.dispose()
