"""The tool calls of a turn: planned, approved, run in threads, recorded, and settled after a crash.

Called by the step loop (`run.react`) and by settlement.
"""
