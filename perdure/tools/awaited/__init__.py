"""Tools that wait: for the result of a Celery task, or until a given time.

A turn that calls such a tool waits without a worker, a thread or a lease (`perdure.turns.calls`). This package only
declares the tools; `port` is the interface that sends tasks, reads their results and revokes them.
"""
