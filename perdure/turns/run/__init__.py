"""Running a session's turns. Read `loop.py` first: `Runner.run` is the entry point of the Celery task `turns.run`.

loop.py        claims a session, runs its turns step by step, and settles each
leave.py       the one way out: acts on an outcome, and releases the session
commit.py      the commit of a step, and commits that survive a lost database
call_model.py  builds the prompt and calls the model
verdict.py     what settling a turn writes, and the errors of turns that cannot run
snapshot.py    loads the snapshot, and saves it before the reply
remember.py    writes a settled turn to working memory
turn_hooks.py  the agent's hooks around a turn
child_watch.py decides when a child process that runs a turn is killed
"""
