"""Conditions on a row that a statement finds by its key."""

from __future__ import annotations


def keyed(condition: str) -> str:
    """`condition`, in a form that makes PostgreSQL look up the statement's key instead of a partial index.

    A partial index, such as that of unsettled turns, is nearly empty while little is due. Reading all of it then seems
    as cheap as looking up a key, and PostgreSQL keeps that plan: until autovacuum analyzes the table, each execution
    reads all that is due. PostgreSQL uses a partial index only if it can prove the index's condition from the
    statement's, and it does not look into a `CASE`. A partial index whose condition has this form serves only
    statements with the same one.
    """
    return f"CASE WHEN {condition} THEN true ELSE false END"
