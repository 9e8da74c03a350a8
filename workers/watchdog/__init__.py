"""The watchdog: a second process that kills a worker in which no Python thread has run for too long."""
