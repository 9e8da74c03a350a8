"""The commands, keys and channels of Redis that perdure and Celery need, and those that an ACL denies.

`perdure doctor` shows what is denied, with `acl_rule`. `perdure.observe.servers` reads it for `perdure status`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis
from redis.exceptions import NoPermissionError

from perdure.network.queues import QUEUES

_SEPARATOR = "\x06\x16"
"""kombu's, between the name of a queue and a priority."""

_KEY = object()

_COMMANDS: tuple[tuple[Any, ...], ...] = (
    *((name, _KEY) for name in ("GET", "EXISTS", "LLEN", "PTTL", "SMEMBERS", "SRANDMEMBER", "TYPE", "XLEN", "ZCARD")),
    *((name, _KEY) for name in ("DEL", "UNLINK", "PERSIST", "MGET")),
    *((name, _KEY, "0") for name in ("BRPOP", "HGET", "HDEL", "HMGET", "LPUSH", "RPUSH", "SADD", "SREM", "SET")),
    *((name, _KEY, "0") for name in ("EXPIRE", "PEXPIRE", "SSCAN", "XDEL", "ZREM", "ZSCORE")),
    *((name, _KEY, "0", "0") for name in ("HSET", "LRANGE", "LTRIM", "SETEX", "XRANGE", "XREVRANGE", "ZADD")),
    *((name, _KEY, "0", "0") for name in ("ZCOUNT", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGEBYSCORE")),
    *((name, _KEY, "0", "0") for name in ("ZREMRANGEBYRANK", "ZREMRANGEBYSCORE")),
    ("RENAME", _KEY, _KEY),
    ("XADD", _KEY, "*", "0", "0"),
    ("EVAL", "return 0", "1", _KEY),
    ("EVALSHA", "0" * 40, "1", _KEY),
    ("SCRIPT", "LOAD", "return 0"),
    ("SCRIPT", "EXISTS", "0" * 40),
    ("TIME",),
)
"""Each command that perdure or kombu sends, also in scripts, with its arguments. Some are tested with keys below."""

_RIGHTS = (
    "-@all +@read +@write +@pubsub +@transaction +@connection -@dangerous "
    "+eval +evalsha +script|load +script|exists +time +info +config|get +client|id +client|unblock +client|setname"
)


def acl_rule(prefix: str, number: int = 0) -> str:
    """The rule of Redis's ACL, without a user's name and password, that suffices at `prefix` in database `number`."""
    keys = [f"{prefix}*", *(f"{each}*" for each in QUEUES), "_kombu.binding*", f"*.{prefix}celery.pidbox*"]
    keys += ["celeryev.*", "celery-task-meta-*", "celery-taskset-meta-*"]
    channels = [f"{prefix}*", "celery-task-meta-*", f"/{number}.{prefix}celery.pidbox", f"/{number}.{prefix}celeryev/*"]
    allowed = ["resetkeys", *(f"~{each}" for each in keys), "resetchannels", *(f"&{each}" for each in channels)]
    return " ".join([*allowed, _RIGHTS])


def denied(client: Any, prefix: str, *, is_broker: bool) -> list[str]:
    """The commands, keys and channels that Redis denies to the user of `client`, such as `key turns`.

    Redis checks a command of a transaction when it arrives. The transaction is then discarded, so no command runs.
    Empty if Redis cannot be reached.
    """
    number = client.get_connection_kwargs().get("db") or 0
    pool: Any = client.connection_pool
    try:
        connection = pool.get_connection()
    except redis.RedisError:
        return []
    try:
        return list(dict.fromkeys(_denied(connection, list(_needed(prefix, number, is_broker=is_broker)))))
    except redis.RedisError:
        return []
    finally:
        connection.disconnect()  # also ends the transaction, if an error has
        pool.release(connection)


def _denied(connection: Any, needed: list[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    connection.send_command("MULTI", check_health=False)
    try:
        connection.read_response()
    except NoPermissionError:  # without it, the other commands would run
        yield "command MULTI"
        return
    connection.send_packed_command(connection.pack_commands([arguments for _, arguments in needed]), check_health=False)
    for of, (name, *_) in needed:
        try:
            connection.read_response()
        except NoPermissionError as error:
            is_command = "command" in str(error)
            yield f"command {name}" if is_command else of
        except redis.ResponseError:  # such as a command that a newer Redis does not allow in a transaction
            continue


def _needed(prefix: str, number: int, *, is_broker: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    """A key or channel, and a command with it."""
    own = f"{prefix}probe"
    for name, *more in _COMMANDS:
        yield f"key {own}", (name, *(own if each is _KEY else each for each in more))
    result = "celery-task-meta-0"
    keys, published, patterns = [result], [f"{prefix}events", result], []
    if is_broker:
        keys += [key for each in QUEUES for key in (each, f"{each}{_SEPARATOR}9")]
        keys += [f"{prefix}unacked", f"{prefix}unacked_index", f"{prefix}unacked_mutex", "_kombu.binding_deadlines"]
        keys += [f"_kombu.binding.{each}" for each in QUEUES]
        keys += [f"0.reply.{prefix}celery.pidbox"]
        published += [f"/{number}.{prefix}celeryev/worker.online"]
        patterns = [f"/{number}.{prefix}celery.pidbox"]
    for key in keys:
        shown = key.replace(_SEPARATOR, r"\x06\x16")
        yield f"key {shown}", ("TYPE", key)
        yield f"key {shown}", ("LTRIM", key, "0", "-1")
    for channel in published + patterns:
        yield f"channel {channel}", ("PUBLISH", channel, "")
    for channel in published[:2]:
        yield f"channel {channel}", ("SUBSCRIBE", channel)
    for pattern in patterns:
        # Redis allows a pattern only if a rule has exactly this pattern.
        yield f"channel {pattern}", ("PSUBSCRIBE", pattern)
