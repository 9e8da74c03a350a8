"""Turns. Each turn is accepted, claimed, run step by step and settled. Then its reply is delivered.

inbox/               accepting messages
lease/               claiming a session, renewing its lease, releasing it
run/                 the step loop, the commit of a step, the way out
calls/               tool calls: intents, results, approvals
prompt/              the system message
outcome.py           how the running of a turn stopped
transcript.py        the messages of a turn and of the session's earlier turns
sweep.py             wake-ups for work that is due
outbox.py            deliveries of replies to their receivers
drain.py             the row with which `perdure drain` stops new turns
committed.py         the committed state of a turn, for streaming clients
reading.py           turns in the form of the API; waiting until a turn is settled
cancel.py            cancelling a turn
feedback.py          people's scores of replies
restore_snapshot.py  restoring a session from a snapshot
"""
