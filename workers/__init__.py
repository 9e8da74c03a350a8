"""Processes: the Celery application, the worker's life, embedded servers, the commands."""
