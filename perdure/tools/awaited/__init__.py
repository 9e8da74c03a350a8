"""Tools whose result comes from outside the worker: a Celery task, or a moment.

A turn that calls one waits without a worker, a thread or a lease, for as long as it takes (`perdure.turns.calls`). The
tools only declare; `port` is the interface through which tasks are sent, asked about and revoked.
"""
