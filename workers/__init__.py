"""The Celery worker: the application, its consumer, its lifecycle and its shutdown."""
