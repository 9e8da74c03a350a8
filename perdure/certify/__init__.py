"""`perdure certify`: kills workers at each boundary of an author's own tools, and checks what the tools declare.

certification.py  what an author adds to a module: scenarios, and a view of the world that the tools change
arguments.py      derives a call's arguments from the tool's schema, for tools without a scenario
scenarios.py      the scenarios of a module's agents, and the tools that are left out
schedules.py      the schedules of a scenario: undisturbed, then a kill at each place, with and without a flush
faults.py         kills a worker at an exact place, and keeps a journal that survives
boundaries.py     the commits that belong to no turn
stack.py          the throw-away servers and their two workers, which play one schedule after another
model.py          the model that the workers ask: it calls the tools of the scenario
worker.py         the module of PERDURE_AGENTS of these workers: the author's agents, whose tools are watched
watching.py       what an execution of a tool changes: the world, files, requests
judging.py        compares what a schedule showed with what the tools declare
certificate.py    the result
run.py            `certify`, which the command, `perdure.testing` and the pytest plugin call
"""
