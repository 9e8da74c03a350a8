"""A Django shop with agents. It loads the Celery application with the project, as Celery's documentation recommends."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
