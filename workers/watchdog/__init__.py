"""The watchdog: a second process that kills a worker in which no Python thread runs for two leases, at least 30 s."""
