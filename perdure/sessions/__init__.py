"""Sessions: each is a sequence of turns of one user, with one transcript.

`states` has the table of transitions between a session's states. `diagram` draws this table for `docs/sessions.md`.
`routing` computes the scope by which a message is routed to a session. `conversations` lists and changes users'
conversations. `ending` and `summary` end a session, `forking` copies a session, and `reading` reads sessions for the
HTTP routes and the CLI. The package `turns` opens and claims sessions with the statements in `queries`. The tasks in
`tasks/sessions.py` end sessions.
"""
