"""Agents of other libraries as perdure's agents. Each library has a room, which is imported on use.

An adapted agent is an `Agent` with a method `begin_turn`. It returns a `Turn` (`turns.run.loop`) with steps of its own.
The engine imports no module of this package; `perdure.host` and `perdure.testing` call `adopt`.
"""
