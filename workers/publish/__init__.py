"""Publishes wake-ups as Celery messages."""
