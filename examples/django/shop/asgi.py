"""The shop as an ASGI application with agents mounted at /agents. `uvicorn shop.asgi:application` serves the shop."""

import os

from django.conf import settings
from django.contrib.auth import aget_user
from django.contrib.sessions.backends.db import SessionStore
from django.core.asgi import get_asgi_application
from django.http import HttpRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

import perdure

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django = get_asgi_application()

from shop.agents import may_approve  # noqa: E402 (its models need Django to be set up)


async def signed_in(request: Request) -> int | None:
    """The id of the Django user to whom the request's session cookie belongs; `None` if no user is signed in."""
    of_django = HttpRequest()
    of_django.session = SessionStore(request.cookies.get(settings.SESSION_COOKIE_NAME))
    user = await aget_user(of_django)
    return user.pk if user.is_authenticated else None


agents = perdure.gateway(authenticate=signed_in, may_approve=may_approve)
application = Starlette(routes=[Mount("/agents", agents), Mount("/", django)], lifespan=lambda _: agents.running())
