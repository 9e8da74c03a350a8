"""Agents of pydantic-ai, run by perdure's turns.

adapt.py        `adapt`: an agent of pydantic-ai as an agent of perdure, checked when the process starts
effects.py      `effect`: what a tool declares in its metadata, and the id of the effect that runs
inner_calls.py  the ids of calls by agents that a tool runs
turn.py         the steps of a turn: runs the agent, and commits what it does in the turn's thread
units.py        the durability capability: hands each model request and tool call to the turn
ledger.py       the tool calls of one reply, on the rows of `tool_effects`
messages.py     pydantic-ai's messages as rows of the transcript, and back
files.py        files in the results of tools
own_model.py    a model of perdure as a model of pydantic-ai
errors.py       pydantic-ai's errors as perdure's
event_loop.py   the event loop of the process, and the turn's thread as the loop sees it

The agent's run is a coroutine on the event loop of the process. Each of its units is handed to the turn's thread, which
alone uses the database: it commits the results of the previous round before a model request, the reply with the intents
of its calls after it, and each result of a call. No database connection is held while the agent, a model or a tool
runs.

After a crash, the run begins again with the stored messages up to the last complete reply. pydantic-ai then executes
the calls of that reply. The ledger returns the results that were recorded, and decides about calls in doubt as for
perdure's own tools.

Only these modules import pydantic-ai. `perdure.adapt` and `perdure.adapters.adopt` import them on use.
"""
