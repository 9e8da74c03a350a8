"""The lease on a session: claim, renewal, the wait for an unavailable model, and each user's share of running turns.

Called by the runner, the sweeper and the Celery tasks.
"""
