"""Wake-ups as Celery messages."""
