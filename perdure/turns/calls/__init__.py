"""The tool calls of a turn: planned, approved, executed in threads, recorded, and resolved after a crash.

plan.py           matches a reply's calls with tools, and validates their arguments
run_calls.py      runs the calls of a message, and resumes them after a crash
ledger.py         the calls' rows, written under the session's fence, and the calls' time limits
execute.py        executes calls in threads; if a message has several calls, records each result in the call's row
awaited.py        calls that wait for a Celery task, a client or a time
outside.py        results that a client brings
hastening.py      shortens the wait for a client while a newer message waits
fan_out.py        Celery calls with a list of arguments: one task per element
approvals.py      calls that wait for a person
hooked.py         the agent's hooks around a call
result_values.py  a call's result, as stored in its row and as text in the transcript

A call's intent is the row that is committed before the call begins. `run.loop` commits intents, and adds results to
the transcript.

The step loop and settlement call these modules. The sweeper calls `awaited`. The channels and the CLI call `approvals`
with a person's decision, and `outside` with a client's result.
"""
