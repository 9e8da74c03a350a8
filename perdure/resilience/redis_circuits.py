"""The circuits in Redis, which all processes of the fleet share. Each transition is one Lua script.

The scripts implement the state machine of `circuit.py`, on Redis's clock. Change the scripts and `circuit.py` together;
a property test compares them. A circuit is a hash. Its probes are a sorted set, ordered by the ends of their leases.
The hash and the set expire after a week without a call. The set of all names loses those of expired circuits whenever
a new circuit begins: hosts of callbacks are named by users, so names come and go. All keys share one hash slot of Redis
Cluster.

While no call fails, a process need not ask Redis about each call: a success that finds the circuit closed and without
failures may lease it to the process for a moment. The process admits calls itself meanwhile, and reports its successes
together (`shared.py`). A circuit that other processes have leased does not open: they may have successes that they have
not reported. The leases are another sorted set; none is given while a failure counts.

If Redis does not respond, the call that detects the failure is delayed by half a second at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

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

_PAGE = 500
"""How many circuits one request reads: Redis and the reply are busy with it for about a millisecond."""

# KEYS of all scripts: the circuit, its probes, the set of circuit names, and the processes that lease the circuit.
# ARGV[1] to ARGV[5] of all scripts: the circuit's name, the milliseconds to add to Redis's time (0 outside tests), and
# the policy's threshold, cooldown and number of probes.
# All scripts return one string with these values, separated by commas: the time, the state before, the state after, the
# number of consecutive failures, the time by which a call is admitted again, the epoch if this call is admitted, and
# the epoch if the circuit is leased to the process.
_BEGIN = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2]
local threshold, cooldown, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local found = redis.call('HMGET', KEYS[1], 'state', 'epoch', 'failures', 'successes', 'last_failure', 'opened_at',
    'failing_since')
local known = found[1]
local circuit = {
    state = known or 'closed',
    epoch = tonumber(found[2] or now),
    failures = tonumber(found[3] or 0),
    successes = tonumber(found[4] or 0),
    last_failure = found[5] or '',
    opened_at = found[6] or '',
    failing_since = tonumber(found[7] or now),
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
        'successes', circuit.successes, 'last_failure', circuit.last_failure, 'opened_at', circuit.opened_at,
        'failing_since', circuit.failing_since)
    redis.call('EXPIRE', KEYS[1], 604800)
    redis.call('SADD', KEYS[3], ARGV[1])  -- each time: Redis may have evicted the set
end

-- Successes of one process, of which the last one ended `age` milliseconds ago.
local function succeed(count, age, epoch)
    circuit.successes = circuit.successes + count
    if count == 0 or circuit.epoch ~= epoch or circuit.failures == 0 then return end
    local last = tonumber(circuit.last_failure) or 0
    if age > 0 and now - age < circuit.failing_since then return end
    if age > 0 and now - age < last then
        circuit.failures, circuit.failing_since = 1, last
    else
        circuit.failures = 0
    end
end

-- A lease ends within a second. One that seems to last longer was given before Redis's clock was set back.
local function is_failing()
    if circuit.failures < threshold then return false end
    return threshold == 1 or redis.call('ZCOUNT', KEYS[4], now, now + 1000) == 0
end

local function answer(epoch, leased)
    local at = ''
    if circuit.state == 'open' then at = circuit.opened_at + cooldown end
    if circuit.state == 'half_open' then at = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or '' end
    -- One string: redis-py reads a list item by item, which takes longer than the script.
    return table.concat({now, before, circuit.state, circuit.failures, at, epoch or '', leased or ''}, ',')
end
"""

# ARGV[6] and ARGV[7]: the call's id, and its lease in milliseconds.
_ADMIT = f"""{_BEGIN}
if circuit.state == 'closed' and is_failing() then
    move('open')
    circuit.opened_at = tonumber(circuit.last_failure) or now
end
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
if not known then
    -- Some names of circuits that have expired leave the set, more than the one that enters it.
    for _, name in ipairs(redis.call('SRANDMEMBER', KEYS[3], 20)) do
        if redis.call('EXISTS', KEYS[3] .. ':' .. name) == 0 then redis.call('SREM', KEYS[3], name) end
    end
    save()
elseif circuit.state ~= before then
    save()
elseif circuit.state ~= 'closed' then
    redis.call('SADD', KEYS[3], ARGV[1])
end
return answer(admitted and circuit.epoch)
"""

# ARGV[6] to ARGV[11]: the call's id, the epoch in which the call was admitted, the number of successes and the age of
# the last one in milliseconds, the process's id, and the milliseconds of a lease (0: none is wanted).
_SUCCEEDED = f"""{_BEGIN}
succeed(tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[7]))
if circuit.epoch == tonumber(ARGV[7]) and circuit.state == 'half_open' then
    circuit.failures = 0
    move('closed')
end
save()
local leased = tonumber(ARGV[11]) > 0 and circuit.state == 'closed' and circuit.failures == 0
if leased then
    redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now)
    redis.call('ZADD', KEYS[4], now + ARGV[11], ARGV[10])
    redis.call('EXPIRE', KEYS[4], 60)
end
return answer(nil, leased and circuit.epoch)
"""

# ARGV[6] to ARGV[11]: as for a success. The successes are those that the process has not reported yet.
_FAILED = f"""{_BEGIN}
succeed(tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[7]))
circuit.last_failure = now
if circuit.epoch == tonumber(ARGV[7]) then
    redis.call('ZREM', KEYS[4], ARGV[10])
    if circuit.failures == 0 then circuit.failing_since = now end
    circuit.failures = circuit.failures + 1
    if circuit.state == 'half_open' or is_failing() then move('open') end
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

# KEYS: circuits, each with its probes. Returns a string for each circuit: its fields, and the probes of one that is
# half open with the ends of their leases; an empty one for a circuit that has expired.
_READ = """
local read = {}
for at = 1, #KEYS, 2 do
    local found = redis.call('HMGET', KEYS[at], 'state', 'epoch', 'failures', 'successes', 'last_failure', 'opened_at')
    local text = ''
    if found[1] then
        for field = 1, 6 do found[field] = found[field] or '' end
        text = table.concat(found, ',')
        local probes = redis.call('ZRANGE', KEYS[at + 1], 0, -1, 'WITHSCORES')
        if #probes > 0 then text = text .. ',' .. table.concat(probes, ',') end
    end
    read[#read + 1] = text
end
return read
"""


@dataclass(frozen=True, slots=True)
class Successes:
    """The number of calls that a process reports together, and the milliseconds since the last one ended."""

    count: int
    age_ms: int = 0


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
        self._process = str(uuid4())
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
        self._read = self._client.register_script(_READ)

    def admit(self, name: str, call_id: str, lease_ms: int) -> CircuitAnswer:
        with _mapped_errors():
            return _answer(self._admit(self._keys(name), self._arguments(name, call_id, lease_ms)), call_id)

    def settle(
        self,
        name: str,
        admission: Admission,
        outcome: CallOutcome,
        successes: Successes | None = None,
        lease_ms: int = 0,
    ) -> CircuitAnswer:
        """Record a call's outcome, with the process's `successes` so far; by default, a success is one.

        After a success, the circuit may be leased to the process for `lease_ms` milliseconds.
        """
        told = successes or Successes(int(outcome is CallOutcome.SUCCEEDED))
        own = (admission.id, admission.epoch, told.count, told.age_ms, self._process, lease_ms)
        with _mapped_errors():
            return _answer(self._settle[outcome](self._keys(name), self._arguments(name, *own)))

    def free(self, name: str, call_id: str) -> None:
        """Free the slot of a probe. Called if Redis did not answer when the probe was admitted or when it ended."""
        with _mapped_errors():
            self._client.zrem(self._keys(name)[1], call_id)

    def reset(self, name: str) -> CircuitAnswer | None:
        with _mapped_errors():
            reply: Any = self._reset(self._keys(name), self._arguments(name))
        return _answer(reply) if reply else None

    def read(self) -> dict[str, Circuit]:
        found: dict[str, Circuit] = {}
        cursor = None
        with _mapped_errors():
            while cursor != 0:
                page: Any = self._client.sscan(self._names, cursor or 0, count=_PAGE)
                cursor, names = page
                found |= self._read_some(names)
        return found

    def _read_some(self, names: Sequence[str]) -> dict[str, Circuit]:
        if not names:
            return {}
        rows: Any = self._read([key for name in names for key in self._keys(name)[:2]])
        return {name: _circuit(row) for name, row in zip(names, rows, strict=True) if row}

    def close(self) -> None:
        self._client.close()

    def _arguments(self, name: str, *own: str | int) -> list[str | int]:
        policy = self._policy
        thresholds = (policy.failure_threshold, policy.cooldown_ms, policy.half_open_max_probes)
        return [name, self._ahead_ms(), *thresholds, *own]

    def _keys(self, name: str) -> tuple[str, ...]:
        circuit = f"{self._names}:{name}"
        return circuit, f"{circuit}:probes", self._names, f"{circuit}:leases"


def _answer(reply: str, call_id: str = "") -> CircuitAnswer:
    now, before, after, failures, until, epoch, leased = reply.split(",")
    admission = Admission(call_id, int(epoch)) if epoch else None
    states = CircuitState(before), CircuitState(after)
    return CircuitAnswer(int(now), *states, int(failures), _moment(until), admission, _moment(leased))


def _circuit(row: str) -> Circuit:
    state, epoch, failures, successes, last_failure, opened_at, *probes = row.split(",")
    return Circuit(
        epoch=int(epoch),
        state=CircuitState(state),
        failures=int(failures),
        successes=int(successes),
        last_failure_ms=_moment(last_failure),
        opened_at_ms=_moment(opened_at),
        probes={each: int(end) for each, end in zip(probes[::2], probes[1::2], strict=True)},
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
