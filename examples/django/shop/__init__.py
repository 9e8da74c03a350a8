"""A Django shop with agents. The Celery application is loaded with the project, as Celery's documentation advises."""

from shop.celery import app as celery_app

__all__ = ["celery_app"]
