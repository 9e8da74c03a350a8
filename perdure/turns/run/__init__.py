"""Running a session's turns: the step loop, the commit of each step, the snapshot and the settlement.

Called by the Celery task `turns.run`. `Runner.run` is the entry point.
"""
