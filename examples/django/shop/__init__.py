"""A Django shop with agents. The package imports the Celery application, as Celery's documentation recommends."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
