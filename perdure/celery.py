"""The application for `celery -A perdure worker|beat|inspect|flower`."""

from perdure.workers.celery import app

__all__ = ["app"]
