"""Django's settings for all tests of a process: Django can be configured only once."""

from __future__ import annotations

import django
from django.apps import apps
from django.conf import settings


def configure() -> None:
    """Configure Django, unless a test of this process has done so. Its applications stay marked as not ready.

    A test that needs them marks them as ready, so that the other tests see a process without Django.
    """
    if settings.configured:
        return
    installed = ["django.contrib.contenttypes", "django.contrib.auth"]
    settings.configure(DATABASES={"default": {}}, INSTALLED_APPS=installed, SECRET_KEY="a test's")
    django.setup()
    apps.ready = False
