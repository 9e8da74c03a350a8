"""Rows as JSON objects, for statements that select the members of a body, in order.

The response models in `perdure.channels.http.schemas` state the types of these members.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Row

from perdure.access.tenants import tenant_of, user_of


def body(row: Row[Any]) -> dict[str, Any]:
    """The row's columns, with ids and times as text. The key in `user_id` is split into `tenant` and `user_id`."""
    members: dict[str, Any] = {}
    for name, value in row._asdict().items():
        if name == "user_id":
            members |= {"tenant": tenant_of(value), "user_id": None if value is None else user_of(value)}
        else:
            members[name] = _as_json(value)
    return members


def _as_json(value: object) -> object:
    match value:
        case UUID():
            return str(value)
        case datetime():
            return value.isoformat()
        case list():
            return [_as_json(each) for each in value]
        case _:
            return value
