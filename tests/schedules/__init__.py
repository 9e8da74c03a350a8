"""Tests of the schedule: slots (the times at which an entry is due), the ledger, the sweeper and Celery beat."""
