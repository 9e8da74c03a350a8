"""Adds perdure to an existing application: to its Celery application (`install`) and its ASGI application (`gateway`).

`install` does not change the application's own tasks, queues and workers. A worker of the application is also a worker
of perdure if it consumes one of perdure's queues.
"""
