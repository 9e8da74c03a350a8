"""perdure within an application: in its Celery application (`install`) and in its ASGI application (`gateway`).

`install` changes nothing of the application's own tasks, queues and workers. A worker of the application is a worker of
perdure only while it consumes one of perdure's queues.
"""
