"""Failing calls: a breaker around retries around the call, and then fallback models.

circuit.py          the breaker's state machine, without I/O
redis_circuits.py   the fleet's circuits, in Redis
stores.py           the store protocol, and circuits in a process's memory
shared.py           the fleet's circuits, or the process's own while Redis is unavailable
registry.py         breakers by name
failures.py, retry.py, fallback.py
"""
