"""Turns: accept → claim → step → settle → deliver.

inbox/               accepting messages
lease/               claiming a session, renewing its lease, releasing it
run/                 the step loop, the commit of a step, the settlement
calls/               tool calls: intents, results, approvals
prompt/              the system message
sweep.py             wake-ups for work that is due
outbox.py            deliveries of replies to their receivers
drain.py             the row with which `perdure drain` stops new turns
committed.py         the committed state of a turn, for streaming clients
cancel.py, feedback.py, reading.py, restore_snapshot.py
"""
