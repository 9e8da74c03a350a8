"""The baseline for the gateway: bare FastAPI routes that accept and return the same bodies.

`python -m benchmarks.bare PORT` serves the routes. Each route exists twice. The route under `/validated` uses no
database. The route under `/committed` runs one single-row INSERT or SELECT in autocommit, in FastAPI's thread pool.
uvicorn runs with its default settings, but without an access log.
"""

from __future__ import annotations

import os
import sys
import uuid
from datetime import UTC, datetime
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine, create_engine

from perdure.turns.inbox.incoming import Incoming

TABLE = """
    CREATE TABLE bare_messages (
        id uuid PRIMARY KEY,
        user_id text NOT NULL,
        text text NOT NULL,
        at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""
_INSERT = "INSERT INTO bare_messages (id, user_id, text) VALUES (%(id)s, %(user_id)s, %(text)s)"
_SELECT = "SELECT user_id, text, at FROM bare_messages WHERE id = %(id)s"


def make_app(engine: Engine) -> FastAPI:
    """Make the application with both variants of each route."""
    app = FastAPI()

    @app.post("/validated/messages", status_code=202)
    async def validate(message: Incoming) -> dict[str, Any]:  # noqa: ARG001 (FastAPI validates it)
        return _accepted(str(uuid.uuid4()))

    @app.post("/committed/messages", status_code=202)
    def commit(message: Incoming) -> dict[str, Any]:
        made = str(uuid.uuid4())
        with engine.connect() as connection:
            row = {"id": made, "user_id": message.user, "text": message.text}
            connection.exec_driver_sql(_INSERT, row)
        return _accepted(made)

    @app.get("/validated/turns/{turn_id}")
    async def validate_id(turn_id: uuid.UUID) -> dict[str, Any]:
        return _turn(turn_id, datetime.now(UTC))

    @app.get("/committed/turns/{turn_id}")
    def read(turn_id: uuid.UUID) -> dict[str, Any]:
        with engine.connect() as connection:
            [found] = connection.exec_driver_sql(_SELECT, {"id": str(turn_id)}).fetchall()
        return _turn(turn_id, found.at)

    return app


def _accepted(turn_id: str) -> dict[str, Any]:
    return {"turn_id": turn_id, "session_id": turn_id, "seq": 1, "status": "accepted", "duplicate": False}


def _turn(turn_id: uuid.UUID, at: datetime) -> dict[str, Any]:
    empty = dict.fromkeys(("reply", "error", "delayed", "usage", "started_at", "settled_at"))
    counts = {"seq": 1, "attempts": 0, "steps": 0}
    ids = {"turn_id": turn_id, "session_id": turn_id}
    return {**ids, **counts, "status": "accepted", "pending_approvals": [], "accepted_at": at, **empty}


def main() -> None:
    """Serve the routes on loopback, on the port that the first argument gives."""
    engine = create_engine(
        os.environ["PERDURE_DATABASE_URL"], isolation_level="AUTOCOMMIT", pool_size=32, max_overflow=0
    )
    uvicorn.run(make_app(engine), host="127.0.0.1", port=int(sys.argv[1]), access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
