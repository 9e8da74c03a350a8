"""Sessions: the conversations that turns belong to.

`states` has the table of transitions, from which `diagram` draws the diagram in `docs/sessions.md`. `ending` and
`summary` end a session, `forking` copies one, `reading` serves the routes. `turns` opens and claims sessions with the
statements in `queries`; the tasks in `tasks/sessions.py` end them.
"""
