"""The watchdog process kills a worker in which no Python thread runs for two lease durations (at least 30 s)."""
