"""`/v1/links`: a service links another channel to a user, lists the links and removes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from starlette.testclient import TestClient

from perdure.runtime import Runtime
from perdure.users.identities import redeem, user_of_identity


def test_a_code_links_a_channel(client: TestClient, runtime: Runtime) -> None:
    """A code links a channel. The link is listed and can be removed. A second removal is not an error."""
    minted = client.post("/v1/links", json={"user_id": "ana"})
    assert minted.status_code == 201
    assert minted.json().keys() == {"code", "expires_at"}
    assert datetime.fromisoformat(minted.json()["expires_at"]).tzinfo is not None
    assert redeem(runtime.database, "slack", "T1/U:1", minted.json()["code"], None) == "ana"
    [link] = client.get("/v1/links?user_id=ana").json()
    assert (link["channel"], link["external_id"]) == ("slack", "T1/U:1")
    named = {"user_id": "ana", "channel": "slack", "external_id": "T1/U:1"}
    for _ in range(2):  # removing a missing link is not an error
        assert client.delete("/v1/links", params=named).status_code == 204
    assert client.get("/v1/links?user_id=ana").json() == []
    assert user_of_identity(runtime.database, None, "slack", "T1/U:1") is None


def test_bad_requests_are_refused(client: TestClient) -> None:
    """Malformed requests about links are refused with 400."""
    bodies: list[Any] = [{}, {"user_id": ""}, {"user_id": 1}, {"user_id": "ana", "ttl_s": 1}, []]
    for body in bodies:
        assert client.post("/v1/links", json=body).status_code == 400, body
    assert client.delete("/v1/links?user_id=ana&channel=slack").status_code == 400
    assert client.delete("/v1/links?user_id=ana&channel=no%20channel&external_id=1").status_code == 204
