"""Turns: a message is accepted, its session claimed, the turn run step by step, settled, and its reply delivered.

inbox/          accepting messages
lease/          claiming a session, holding it, releasing it
run/            the step loop, the commit of a step, settling
calls/          tool calls: intents, results, approvals
prompt/         what a model is sent
sweep.py        wake-ups for work that is due
outbox.py       deliveries of replies
cancel.py, feedback.py, drain.py, reading.py, restore_snapshot.py
"""
