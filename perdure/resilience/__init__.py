"""Circuit breakers, retries and fallbacks: `fallback(breaker(retry(call)))`.

`circuit` decides when a breaker opens and closes; `redis_circuits` implements the same rules in Lua, for the whole
fleet. While Redis cannot be reached, each process has breakers of its own.
"""
