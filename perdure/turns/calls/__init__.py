"""The tool calls of a turn: planned, approved, executed in threads, recorded, and decided after a crash.

plan.py           which calls a message makes, and what each needs
run_calls.py      runs the calls of a message, and resumes them after a crash
execute.py        one call in a thread; records its result in its row if the message has several calls
awaited.py        calls that wait for a Celery task or a time; fan_out.py: a list of arguments
approvals.py      calls that wait for a person
hooked.py         the agent's hooks around a call
result_values.py  what a call's result is in its row and in the transcript

Called by the step loop (`run.react`) and by settlement. `run.commit_step` commits intents and, to the transcript,
results.
"""
