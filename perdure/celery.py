"""Where `celery -A perdure worker|beat|inspect|flower` finds the application."""

from perdure.workers.celery import app

__all__ = ["app"]
