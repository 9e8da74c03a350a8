"""The circuits in Redis, which all processes of the fleet share. Each transition is one Lua script.

The scripts implement the state machine of `circuit.py`, on Redis's clock. Change the scripts and `circuit.py` together;
a property test compares them. A circuit is a hash. Its probes are a sorted set, ordered by the ends of their leases.
The hash and the set expire after a week without a call. All keys share one hash slot of Redis Cluster.

If Redis does not respond, the call that detects the failure is delayed by half a second at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from perdure.errors import Unavailable
from perdure.redis import client_url
from perdure.resilience.circuit import Admission, CallOutcome, Circuit, CircuitState, Policy
from perdure.resilience.stores import CircuitAnswer
from perdure.settings import REDIS_PREFIX
from perdure.text.untrusted import first_line

_TIMEOUT_S = 0.25
"""Seconds to wait for a connection, and seconds to wait for a response: together half a second."""

_CONNECTIONS = 10_000  # a thread uses one connection, for the duration of one script

_NAMES = "{breakers}"
"""The key of the set of circuit names, without the prefix. The keys of each circuit begin with this key.

The braces are a hash tag of Redis Cluster.
"""

_FIELDS = ("state", "epoch", "failures", "successes", "last_failure", "opened_at")

# KEYS of all scripts: the circuit, its probes, and the set of circuit names.
# ARGV[1] to ARGV[5] of all scripts: the circuit's name, the milliseconds to add to Redis's time (0 outside tests), and
# the policy's threshold, cooldown and number of probes.
# All scripts return one string with these values, separated by commas: the time, the state before, the state after, the
# number of consecutive failures, the time by which a call is admitted again, and the epoch if this call is admitted.
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

# ARGV[6] and ARGV[7]: the call's id, and its lease in milliseconds.
_ADMIT = f"""{_BEGIN}
if circuit.state == 'open' then
    local opened_at = tonumber(circuit.opened_at)
    if now < opened_at or now >= opened_at + cooldown then move('half_open') end
end
local admitted = circuit.state == 'closed'
if circuit.state == 'half_open' then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    -- A client that lost the answer repeats the request: it already has its slot.
    admitted = redis.call('ZSCORE', KEYS[2], ARGV[6]) or redis.call('ZCARD', KEYS[2]) < most
    if admitted then
        redis.call('ZADD', KEYS[2], now + ARGV[7], ARGV[6])
        redis.call('EXPIRE', KEYS[2], 604800)
    end
end
if not known or circuit.state ~= before then save() end
return answer(admitted and circuit.epoch)
"""

# ARGV[6] and ARGV[7]: the call's id, and the epoch in which the call was admitted.
_SUCCEEDED = f"""{_BEGIN}
circuit.successes = circuit.successes + 1
if circuit.epoch == tonumber(ARGV[7]) then
    circuit.failures = 0
    if circuit.state == 'half_open' then move('closed') end
end
save()
return answer()
"""

# ARGV[6] and ARGV[7]: the call's id, and the epoch in which the call was admitted.
_FAILED = f"""{_BEGIN}
circuit.last_failure = now
if circuit.epoch == tonumber(ARGV[7]) then
    circuit.failures = circuit.failures + 1
    if circuit.state == 'half_open' or circuit.failures >= threshold then move('open') end
end
save()
return answer()
"""

# ARGV[6] and ARGV[7]: the call's id, and the epoch in which the call was admitted.
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
    """The circuits in the Redis at `url`, under keys that begin with `prefix`. Thread-safe.

    `url` is in kombu's or redis-py's form. Only tests set `ahead_ms` and `timeout_s`. `ahead_ms` returns the number of
    milliseconds to add to Redis's time.
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
            client_url(url),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            max_connections=_CONNECTIONS,
            decode_responses=True,
            # Retry once, without a delay: after a restart of Redis every pooled connection is broken.
            retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        )
        self._admit = self._client.register_script(_ADMIT)
        self._settle = {
            CallOutcome.SUCCEEDED: self._client.register_script(_SUCCEEDED),
            CallOutcome.FAILED: self._client.register_script(_FAILED),
            CallOutcome.RELEASED: self._client.register_script(_RELEASED),
        }
        self._reset = self._client.register_script(_RESET)

    def admit(self, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        with _mapped_errors():
            return _answer(self._admit(self._keys(name), self._arguments(name, call_id, lease_ms)), call_id)

    def settle(self, name: str, admission: Admission, outcome: CallOutcome) -> CircuitAnswer:
        with _mapped_errors():
            return _answer(
                self._settle[outcome](self._keys(name), self._arguments(name, admission.id, admission.epoch))
            )

    def free(self, name: str, call_id: str) -> None:
        """Free the slot of a probe. Called if Redis did not answer when the probe was admitted or when it ended."""
        with _mapped_errors():
            self._client.zrem(self._keys(name)[1], call_id)

    def reset(self, name: str) -> CircuitAnswer | None:
        with _mapped_errors():
            reply: Any = self._reset(self._keys(name), self._arguments(name))
        return _answer(reply) if reply else None

    def read(self) -> dict[str, Circuit]:
        with _mapped_errors():
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
        self._client.close()

    def _arguments(self, name: str, *own: str | int) -> list[str | int]:
        policy = self._policy
        thresholds = (policy.failure_threshold, policy.cooldown_ms, policy.half_open_max_probes)
        return [name, self._ahead_ms(), *thresholds, *own]

    def _keys(self, name: str) -> tuple[str, str, str]:
        return f"{self._names}:{name}", f"{self._names}:{name}:probes", self._names


def _answer(reply: str, call_id: str = "") -> CircuitAnswer:
    now, before, after, failures, until, epoch = reply.split(",")
    admission = Admission(call_id, int(epoch)) if epoch else None
    return CircuitAnswer(int(now), CircuitState(before), CircuitState(after), int(failures), _moment(until), admission)


def _circuit(fields: Sequence[str], probes: Sequence[tuple[str, float]]) -> Circuit:
    state, epoch, failures, successes, last_failure, opened_at = fields
    return Circuit(
        epoch=int(epoch),
        state=CircuitState(state),
        failures=int(failures),
        successes=int(successes),
        last_failure_ms=_moment(last_failure),
        opened_at_ms=_moment(opened_at),
        probes={each: int(end) for each, end in probes},
    )


def _moment(text: str) -> int | None:
    return int(text) if text else None


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Raise errors of Redis, and errors caused by malformed data in Redis, as `Unavailable`."""
    try:
        yield
    except (redis.RedisError, ValueError) as error:
        raise Unavailable(f"The breakers in Redis cannot be reached: {first_line(str(error))}") from error
