"""The fleet's circuits in Redis: each transition is one script, in Redis's own time.

The scripts are the state machine of `circuit.py` in Lua. A change of one is a change of both; a property test compares
them. A circuit is a hash; its probes are a sorted set by the ends of their leases. Both expire after a week without a
call. All keys share one hash slot of a cluster.

Every wait is bounded: an unresponsive Redis costs the call that notices it half a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from perdure.errors import Unavailable
from perdure.resilience.circuit import Admission, Circuit, Outcome, Policy, State
from perdure.resilience.stores import Answer
from perdure.settings import REDIS_PREFIX
from perdure.text.untrusted import first_line

_TIMEOUT_S = 0.25
"""Timeout for connecting, and for an answer: together half a second."""

_CONNECTIONS = 10_000  # each thread holds one for the length of a script

_NAMES = "{breakers}"
"""After the prefix: the set of all names, and the beginning of each circuit's keys. The braces are a hash tag."""

_FIELDS = ("state", "epoch", "failures", "successes", "last_failure", "opened_at")

# All scripts: KEYS are the circuit, its probes, and the set of all names. ARGV are the name, milliseconds added to
# Redis's time (0 except in tests), the policy's three numbers, and two arguments of the script's own. They return the
# time, the states before and after, failures in a row, when a call is admitted at the latest, and the epoch if one was.
_BEGIN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
local threshold, cooldown, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'failures', 'successes', 'last_failure', 'opened_at')
local known = found[1]
local circuit = {
    state = known or 'closed',
    epoch = tonumber(found[2] or now),
    failures = tonumber(found[3] or 0),
    successes = tonumber(found[4] or 0),
    last_failure = found[5] or '',
    opened_at = found[6] or '',
}
local before = circuit.state

local function move(state)
    if state == 'closed' then circuit.opened_at = '' end
    if state == 'open' then circuit.opened_at = now end
    circuit.state = state
    circuit.epoch = math.max(circuit.epoch + 1, now)
    redis.call('DEL', KEYS[2])
end

local function save()
    redis.call('HSET', KEYS[1], 'state', circuit.state, 'epoch', circuit.epoch, 'failures', circuit.failures,
        'successes', circuit.successes, 'last_failure', circuit.last_failure, 'opened_at', circuit.opened_at)
    redis.call('EXPIRE', KEYS[1], 604800)
    if not known then redis.call('SADD', KEYS[3], ARGV[1]) end
end

local function answer(epoch)
    local at = ''
    if circuit.state == 'open' then at = circuit.opened_at + cooldown end
    if circuit.state == 'half_open' then at = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or '' end
    -- One string: redis-py reads a list item by item, which takes longer than the script.
    return table.concat({now, before, circuit.state, circuit.failures, at, epoch or ''}, ',')
end
"""

# ARGV: the call's id, the milliseconds of its lease.
_ADMIT = f"""{_BEGIN}
if circuit.state == 'open' then
    local opened_at = tonumber(circuit.opened_at)
    if now < opened_at or now >= opened_at + cooldown then move('half_open') end
end
local admitted = circuit.state == 'closed'
if circuit.state == 'half_open' then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    -- A client that lost the answer asks again: it has its slot already.
    admitted = redis.call('ZSCORE', KEYS[2], ARGV[6]) or redis.call('ZCARD', KEYS[2]) < most
    if admitted then
        redis.call('ZADD', KEYS[2], now + ARGV[7], ARGV[6])
        redis.call('EXPIRE', KEYS[2], 604800)
    end
end
if not known or circuit.state ~= before then save() end
return answer(admitted and circuit.epoch)
"""

# ARGV: the call's id, its epoch.
_SUCCEEDED = f"""{_BEGIN}
circuit.successes = circuit.successes + 1
if circuit.epoch == tonumber(ARGV[7]) then
    circuit.failures = 0
    if circuit.state == 'half_open' then move('closed') end
end
save()
return answer()
"""

# ARGV: the call's id, its epoch.
_FAILED = f"""{_BEGIN}
circuit.last_failure = now
if circuit.epoch == tonumber(ARGV[7]) then
    circuit.failures = circuit.failures + 1
    if circuit.state == 'half_open' or circuit.failures >= threshold then move('open') end
end
save()
return answer()
"""

# ARGV: the call's id, its epoch.
_RELEASED = f"""{_BEGIN}
if circuit.epoch == tonumber(ARGV[7]) then redis.call('ZREM', KEYS[2], ARGV[6]) end
return answer()
"""

_RESET = f"""{_BEGIN}
if not known then return nil end
circuit.failures = 0
move('closed')
save()
return answer()
"""


class FleetCircuits:
    """The circuits in the Redis at `url`, in kombu's spelling or redis-py's, under keys that begin with `prefix`.

    Thread-safe. For tests: `ahead_ms` is added to Redis's time, and `timeout_s` bounds each wait.
    """

    def __init__(
        self,
        url: str,
        policy: Policy,
        ahead_ms: Callable[[], int] = lambda: 0,
        timeout_s: float = _TIMEOUT_S,
        prefix: str = REDIS_PREFIX,
    ) -> None:
        self._names = f"{prefix}{_NAMES}"
        self._policy = policy
        self._ahead_ms = ahead_ms
        self._client = redis.Redis.from_url(
            _as_redis_py_spells(url),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=_CONNECTIONS,
            decode_responses=True,
            # One retry: after a restart of Redis every pooled connection is dead.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        self._admit = self._client.register_script(_ADMIT)
        self._settle = {
            Outcome.SUCCEEDED: self._client.register_script(_SUCCEEDED),
            Outcome.FAILED: self._client.register_script(_FAILED),
            Outcome.RELEASED: self._client.register_script(_RELEASED),
        }
        self._reset = self._client.register_script(_RESET)

    def admit(self, name: str, call_id: str, lease_ms: int) -> Answer:
        """See `CircuitStore.admit`."""
        with _explained():
            return _answer(self._admit(self._keys(name), self._arguments(name, call_id, lease_ms)), call_id)

    def settle(self, name: str, admission: Admission, outcome: Outcome) -> Answer:
        """See `CircuitStore.settle`."""
        with _explained():
            return _answer(
                self._settle[outcome](self._keys(name), self._arguments(name, admission.id, admission.epoch))
            )

    def free(self, name: str, call_id: str) -> None:
        """Free the slot of a probe whose admission may not have reached its caller.

        Raises:
            Unavailable: Redis cannot be reached.
        """
        with _explained():
            self._client.zrem(self._keys(name)[1], call_id)

    def reset(self, name: str) -> Answer | None:
        """See `CircuitStore.reset`."""
        with _explained():
            said: Any = self._reset(self._keys(name), self._arguments(name))
        return _answer(said) if said else None

    def read(self) -> dict[str, Circuit]:
        """All the circuits."""
        with _explained():
            names: Any = self._client.smembers(self._names)
            ordered = sorted(names)
            pipeline = self._client.pipeline(transaction=False)
            for name in ordered:
                key, probes, _ = self._keys(name)
                pipeline.hmget(key, *_FIELDS)
                pipeline.zrange(probes, 0, -1, withscores=True)
            rows = pipeline.execute()
        pairs = zip(ordered, rows[::2], rows[1::2], strict=True)
        return {name: _circuit(fields, probes) for name, fields, probes in pairs if fields[0]}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _arguments(self, name: str, *own: str | int) -> list[str | int]:
        policy = self._policy
        thresholds = (policy.failure_threshold, policy.cooldown_ms, policy.half_open_max_probes)
        return [name, self._ahead_ms(), *thresholds, *own]

    def _keys(self, name: str) -> tuple[str, str, str]:
        return f"{self._names}:{name}", f"{self._names}:{name}:probes", self._names


def _answer(said: str, call_id: str = "") -> Answer:
    now, before, after, failures, until, epoch = said.split(",")
    admission = Admission(call_id, int(epoch)) if epoch else None
    return Answer(int(now), State(before), State(after), int(failures), _moment(until), admission)


def _circuit(fields: Sequence[str], probes: Sequence[tuple[str, float]]) -> Circuit:
    state, epoch, failures, successes, last_failure, opened_at = fields
    return Circuit(
        epoch=int(epoch),
        state=State(state),
        failures=int(failures),
        successes=int(successes),
        last_failure_ms=_moment(last_failure),
        opened_at_ms=_moment(opened_at),
        probes={each: int(end) for each, end in probes},
    )


def _moment(text: str) -> int | None:
    return int(text) if text else None


@contextmanager
def _explained() -> Iterator[None]:
    """Map Redis's errors to one of the tree, also for a key of another type or with a malformed value."""
    try:
        yield
    except (redis.RedisError, ValueError) as error:
        raise Unavailable(f"The breakers in Redis cannot be reached: {first_line(str(error))}") from error


def _as_redis_py_spells(url: str) -> str:
    scheme = "redis+socket://"
    return f"unix://{url.removeprefix(scheme)}".replace("virtual_host=", "db=") if url.startswith(scheme) else url
