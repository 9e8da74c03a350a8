"""What an operator sees: metrics, the status of an installation, and the processes that run.

presence     each worker and beat reports to PostgreSQL that it runs
measures     what a worker counts and times, as metrics of its own port
readings     what PostgreSQL and Redis have to tell: backlog, deliveries, schedules, servers; cached
exposition   the readings as the metrics of the gateway's `/metrics`
status       the readings as `perdure status` shows them, with what is broken
"""
