"""Removes the values of a failed statement from the driver's errors.

Errors are logged, and logs outlive the erasure of a user. PostgreSQL quotes values in the lines after the first
(`DETAIL: Key (…)=(…)`, `Failing row contains (…)`, `CONTEXT: JSON data, line 1: …`). It also quotes a value in the
first line, between quotation marks, if the value is invalid for its type, or is no valid name or query.
"""

from __future__ import annotations

import psycopg2
from sqlalchemy.engine import ExceptionContext

_QUOTES_NO_VALUE = ("08", "23", "25", "40", "53", "55", "57")
"""Classes of error codes: connections, constraints, transactions, resources, and operator intervention. The first line
of their messages quotes only names of the schema.
"""


def hide_values(context: ExceptionContext) -> None:
    """Cut the values out of the text of a driver's error, and of SQLAlchemy's error around it.

    The code and the fields of `diag` stay. `hides_values` marks the errors for `perdure.errors.loggable`.
    """
    error, wrapped = context.original_exception, context.sqlalchemy_exception
    if not isinstance(error, psycopg2.Error):
        return
    if error.pgcode is not None:
        shown = (error.diag.message_primary or type(error).__name__).partition("\n")[0]
        if not error.pgcode.startswith(_QUOTES_NO_VALUE):
            message = shown.partition('"')[0].rstrip(" :")
            shown = f"{message} ({error.pgcode})"
        error.args = (shown,)
    for each in (error, wrapped):
        if each is not None:
            each.hides_values = True  # type: ignore[union-attr]  # for `loggable`, which does not import the driver
    if wrapped is not None:
        wrapped.args = (f"({type(error).__name__}) {error}",)
