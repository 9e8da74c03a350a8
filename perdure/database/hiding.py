"""Removes the values of a failed statement from the driver's errors.

Errors are logged, and logs outlive the erasure of a user. PostgreSQL's messages quote values in the lines after the
first (`DETAIL: Key (…)=(…)`, `Failing row contains (…)`, `CONTEXT: JSON data, line 1: …`). If a value is invalid
for its type, or is not a valid name or query, the first line also quotes the value, in quotation marks.
"""

from __future__ import annotations

import psycopg2
from sqlalchemy.engine import ExceptionContext

_QUOTES_NO_VALUE = ("08", "23", "25", "40", "53", "55", "57")
"""Classes of error codes whose messages quote no values in the first line, only names such as those of tables. The
classes are for connections, constraints, transactions, resources and operator intervention.
"""


def hide_values(context: ExceptionContext) -> None:
    """Remove the values from the message of a driver's error, and from the SQLAlchemy error that wraps it.

    The error code and the fields of `diag` stay unchanged. The attribute `hides_values` tells `perdure.errors.loggable`
    that it may log the message.
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
