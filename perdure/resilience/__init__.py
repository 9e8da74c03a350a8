"""Circuit breakers, retries and fallbacks: `fallback(breaker(retry(call)))`.

`circuit` decides when a breaker opens and closes. `redis_circuits` implements the same rules in Lua. All processes
share the breakers in Redis. While Redis cannot be reached, each process uses its own breakers.

`duties` keeps recurring work apart, so that a failure of one kind of work does not stop another.
"""
