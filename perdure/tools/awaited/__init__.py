"""Tools that make a turn wait: for the result of a Celery task, for a result from outside, or until a given time.

While the turn waits, it occupies no worker, thread or lease (`perdure.turns.calls`). This package only declares the
tools; `port` is the interface that sends tasks, reads their results and revokes them.
"""
