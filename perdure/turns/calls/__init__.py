"""The tool calls of a turn: planned, approved, executed in threads, recorded, and decided after a crash.

Called by the step loop (`run.react`) and by settlement. `run.commit_step` commits intents and results.
"""
