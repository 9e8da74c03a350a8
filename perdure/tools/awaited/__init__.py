"""Tools whose result comes from outside the worker: a Celery task, or a moment.

A turn that calls such a tool waits without a worker, a thread or a lease (`perdure.turns.calls`). The tools only
declare the calls; `port` is the interface through which tasks are sent, asked about and revoked.
"""
