"""The schedule: its entries (`entries`) and their form for Celery's beat (`beat`)."""
