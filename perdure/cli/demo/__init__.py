"""`perdure demo`: shows that an answer survives the worker that writes it.

    command.py          the command
    demonstration.py    runs `perdure up` in a throw-away directory, kills a worker, and reports what happens and when
    slow_model.py       a model server on loopback that writes an answer word by word, and reports who asks it
    shop.py             the agent, whose only tool notes each order in a file

Nothing here is part of the engine: the processes are those of `perdure up`, and the model is reached like any server
that speaks Chat Completions.
"""
