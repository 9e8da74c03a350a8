"""The lease on a session: claim, renewal and parking, and each user's share of the running turns.

Called by the runner, the sweeper and the Celery tasks.
"""
