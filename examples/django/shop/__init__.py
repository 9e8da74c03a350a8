"""A shop in Django with agents. As Django's documentation has it, the Celery application is loaded with the project."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
