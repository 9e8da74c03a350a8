"""Publishes Celery messages: wake-ups (`wake`, `background`), and the tasks of Celery tools (`calls`)."""
