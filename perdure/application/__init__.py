"""perdure in another application: `install`, `gateway`, `send` and `result`.

install.py   adds perdure to the application's Celery application; its own tasks, queues and workers do not change
step.py      runs perdure in a worker of the application that consumes one of perdure's queues
gateway.py   the gateway as a part of the application's ASGI application
sending.py   `perdure.send`, within the application's own transactions
results.py   `perdure.result`
process.py   the parts that one process of the application shares, made on first use from the settings (`PERDURE_*`)
"""
