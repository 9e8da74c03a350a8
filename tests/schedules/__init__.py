"""Schedules: slots in local time, the ledger, the sweeper, beat."""
