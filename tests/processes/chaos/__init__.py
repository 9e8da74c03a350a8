"""The parts of `test_chaos`.

actor.py     a thread that uses the installation while faults happen
senders.py   send messages: one as a program with the database does, one over HTTP
listeners.py follow the events of turns, and resume after each cut
planner.py   adds users' schedules
beat.py      a Celery beat
faults.py    the faults
"""
