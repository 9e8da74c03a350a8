"""The crash table: what perdure and other systems do when a worker is killed, at each point of a turn.

`section` plays the schedules of `systems` with the `harness`, which kills, and the `recorder`, which sees all. The
modules `on_…` are the workers' programs. Each sets one system up as its own documents do, and imports nothing else, so
that it starts as fast as it can. All run the turn of `script`.
"""
