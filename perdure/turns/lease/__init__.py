"""The lease on a session: claimed, renewed, parked, and each user's share of the running turns.

Called by the runner, the sweeper and the tasks.
"""
