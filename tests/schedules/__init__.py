"""Tests of schedules: slots in local time, the ledger, the sweeper and beat."""
