"""Who may run a session: the tenure and its claim, its renewal, every statement that ends it, and users' shares.

Called by the runner, the sweeper and the Celery tasks.
"""
