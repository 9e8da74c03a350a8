"""The example shop in Django: the users of `django.contrib.auth` are the agents' users."""

from __future__ import annotations

import re

import httpx2
import pytest

from tests.examples.conftest import QUEUES, Example

EXAMPLE = "django"


def _sign_in(client: httpx2.Client, name: str) -> None:
    form = client.get("/admin/login/").text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)
    assert token is not None
    fields = {"username": name, "password": "a long password", "csrfmiddlewaretoken": token[1], "next": "/admin/"}
    assert client.post("/admin/login/", data=fields).status_code == 302


@pytest.mark.long
def test_a_user_of_django_talks_to_the_agent(example: Example) -> None:
    """Django's session cookie authenticates a user of the agent. Another user cannot read the first user's turn."""
    example.environment |= {"DJANGO_SUPERUSER_PASSWORD": "a long password", "DJANGO_SUPERUSER_EMAIL": "a@b.example"}
    example.script("manage.py", "migrate", "--verbosity", "0")
    for name in ("ana", "ben"):
        example.environment["DJANGO_SUPERUSER_USERNAME"] = name
        example.script("manage.py", "createsuperuser", "--noinput")
    address = example.serve("shop.asgi:application")
    example.worker("shop", f"celery,{QUEUES}")
    with httpx2.Client(base_url=address, timeout=30) as ana, httpx2.Client(base_url=address) as ben:
        hello = {"user_id": "1", "text": "what is 12*7+5?"}
        assert ana.post("/agents/v1/messages", json=hello).status_code == 401
        _sign_in(ana, "ana")
        _sign_in(ben, "ben")
        assert '<meta name="user" content="1">' in ana.get("/agents/").text
        turn = ana.post("/agents/v1/messages", json=hello).json()["turn_id"]
        assert "89" in ana.get(f"/agents/v1/turns/{turn}?wait=20").json()["reply"]["text"]
        assert ben.get(f"/agents/v1/turns/{turn}").status_code == 404
        form = {"item": "a lamp", "csrfmiddlewaretoken": ana.cookies["csrftoken"]}
        ordered = ana.post("/orders/", data=form).json()["turn_id"]
        assert ana.get(f"/agents/v1/turns/{ordered}?wait=20").json()["status"] == "done"
