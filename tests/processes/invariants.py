"""What holds after any faults, beside `Installation.check`. Each function asserts one kind of invariant.

`test_invariants` plants violations of each.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any

from perdure.schedules.entries import active_entries
from perdure.timetable.cadence import Every
from perdure.turns.reading import read_turn
from tests.processes.chaos.planner import Plan
from tests.processes.chaos.senders import Request
from tests.processes.faults import wait_until
from tests.processes.installation import TOOL_TIMEOUT_S, Installation
from tests.processes.receiver import Receiver
from tests.processes.streams import Reader
from tests.schedules.fleet import TASKS

ONCE = ("unsafe", "charge")
"""The tools that act at each execution, and that are never executed twice."""

VERSIONS = ("You are under test.", "You are under test, and have changed.", "You are new, and under test.")
"""The instructions of the agents: of `tester` in both deployments, and of `newer`."""

MINUTE = timedelta(minutes=1)
LATE = timedelta(seconds=30)
"""A schedule that is removed within `LATE` after a slot may not have fired for that slot."""

LONGEST_GAP = 5 * MINUTE
"""The longest time between two slots of an entry that run, while faults take the tasks that fire them."""

NEXT_SLOT_S = 90.0


def check_effects(installation: Installation) -> None:
    """Assert that no call was repeated that must not be, that each effect has an intent, and each intent an end."""
    # A worker paused inside a tool may resume and act after its successor's probe. Nothing can prevent that.
    frozen = [effect for effect in installation.faults.effects() if effect.after_s >= TOOL_TIMEOUT_S]
    happened = Counter((effect.tool, effect.effect_id) for effect in installation.faults.effects())
    stopped = Counter((effect.tool, effect.effect_id) for effect in frozen)
    rows = installation.query("SELECT tool, effect_id, status FROM tool_effects")
    for row in rows:
        key = (row.tool, str(row.effect_id))
        times = happened.pop(key, 0)
        if row.tool in ONCE:
            assert times <= 1, "an unsafe call is never repeated"
        if row.tool == "probed":
            assert times - stopped[key] <= 1, "a call with a probe is repeated only if the probe ran before the effect"
        if row.status == "done":
            assert times >= 1, "a call that is reported as done was done"
        assert row.status != "intended", "each call has an end"
    assert not happened, "each effect has an intent"


def check_sent(installation: Installation, sent: Iterable[Request]) -> None:
    """Assert that each message over HTTP is one turn, however often it was sent, and that all answers name the turn."""
    rows = installation.query(
        "SELECT message_id, text, turn_id::text FROM inbox WHERE starts_with(message_id, 'http ')"
    )
    accepted = defaultdict(list)
    for row in rows:
        accepted[row.message_id].append((row.text, row.turn_id))
    for request in sent:
        assert len(set(request.turn_ids)) == 1, "each answer to a repeated message names the same turn"
        assert accepted.pop(request.key, []) == [(request.text, request.turn_ids[0])], "a message is accepted once"
    assert not accepted, "each accepted message was sent"


def check_read(installation: Installation, readers: Iterable[Reader]) -> None:
    """Assert that each reader of a stream has the committed messages of its turn, in order, and its outcome."""
    for reader in readers:
        rows = installation.query(
            "SELECT m.content, t.status FROM messages AS m JOIN turns AS t USING (turn_id) "
            "WHERE m.turn_id = %(id)s ORDER BY m.seq",
            id=reader.turn_id,
        )
        assert reader.committed == [row.content for row in rows], "a listener has the committed text"
        assert reader.done is not None, "a listener sees the end"
        assert {reader.done["status"]} == {row.status for row in rows}, "a listener sees the turn's outcome"


def check_plans(installation: Installation, plans: Iterable[Plan]) -> None:
    """Assert that each user's schedule sent one message for each of its slots, and is removed.

    No slot fires while the turn of an earlier one is unsettled.
    """
    rows = installation.query(
        "SELECT message_id, settled_at FROM inbox JOIN turns USING (turn_id) WHERE starts_with(message_id, 'schedule:')"
    )
    fired: defaultdict[str, dict[datetime, datetime]] = defaultdict(dict)
    for row in rows:
        _, schedule_id, slot = row.message_id.split(":", 2)
        fired[schedule_id][datetime.fromisoformat(slot)] = row.settled_at
    for plan in plans:
        slots = fired.pop(str(plan.schedule_id), {})
        due = list(_slots(plan))
        if plan.removed_at is not None and due and due[-1] not in slots and plan.removed_at - due[-1] < LATE:
            due.pop()
        due = [slot for slot in due if slot in slots or not _is_waiting(slots, slot)]
        assert sorted(slots) == due, f"a schedule fires once for each slot: {plan}"
    assert not fired, "each firing is of a schedule"
    assert not installation.query("SELECT FROM reminders"), "a schedule that has fired is removed"


def check_slots(installation: Installation) -> None:
    """Assert that perdure's own entries run at their slots, no slot after it is done, and none stops running.

    A slot that no worker has begun within its minute is skipped: of several missed slots, only the newest runs.
    """
    entries = active_entries(TASKS, installation.runtime.settings)
    rows = installation.query("SELECT * FROM schedule_slots ORDER BY entry, slot")
    by_entry = defaultdict(list)
    for row in rows:
        by_entry[row.entry].append(row)
        slot = row.slot.astimezone(UTC)
        assert entries[row.entry].cadence.previous(slot) == slot, "a slot is one of the entry's cadence"
        assert row.done_at is None or row.taken_at <= row.done_at, "a slot that is done does not run again"
    for name, entry in entries.items():
        if isinstance(entry.cadence, Every):
            gaps = [later.slot - row.slot for row, later in pairwise(by_entry[name])]
            assert all(gap <= LONGEST_GAP for gap in gaps), f"{name} runs again and again: {gaps}"


def wait_for_slots(installation: Installation) -> None:
    """Wait until the newest slot of each entry that runs each minute is done, after the faults have ended."""
    newest = """
        SELECT count(*) AS n FROM schedule_slots
        WHERE slot = date_trunc('minute', perdure_now()) AND done_at IS NOT NULL
    """
    entries = active_entries(TASKS, installation.runtime.settings).values()
    minutely = sum(isinstance(entry.cadence, Every) for entry in entries)
    wait_until(lambda: installation.query(newest)[0].n == minutely, "the newest slots are done", NEXT_SLOT_S)


def check_versions(installation: Installation) -> int:
    """Assert that one version of its agent answers each turn; returns the number of versions that answered any.

    A turn is known by its text. Texts of more than one turn are left out.
    """
    asked_of: defaultdict[str, set[str]] = defaultdict(set)
    for body in installation.model_server.server.requests:
        system = body["messages"][0]["content"]
        for version in (each for each in VERSIONS if system.startswith(each)):
            asked_of[_newest_text(body)].add(version)
    once = {row.text for row in installation.query("SELECT text FROM inbox GROUP BY text HAVING count(*) = 1")}
    for text in once & asked_of.keys():
        assert len(asked_of[text]) == 1, f"a pinned turn ends at the version that began it: {text!r}"
    return len(set().union(*asked_of.values()))


def check_deliveries(installation: Installation, receiver: Receiver, within_s: float = 60) -> None:
    """Assert that each reply owed to `receiver` came, and that other receivers, which never answer, got none."""
    owed = installation.query("SELECT turn_id, target ->> 'url' AS url, status FROM deliveries")
    for row in (row for row in owed if row.url == receiver.url):
        came = wait_until(partial(receiver.of, str(row.turn_id)), "the reply is delivered", within_s)
        committed = read_turn(installation.database, row.turn_id)["reply"]["text"]
        assert {each.body["reply"]["text"] for each in came} == {committed}, "a delivery has the committed reply"
    silent = [row for row in owed if row.url != receiver.url]
    assert {row.status for row in silent} <= {"pending", "failed"}, "no receiver accepted these"


def _is_waiting(fired: Mapping[datetime, datetime], slot: datetime) -> bool:
    """Whether a schedule's earlier turn was unsettled at `slot`, or settled so late that a later slot fired instead."""
    before = max((each for each in fired if each < slot), default=None)
    if before is None:
        return False
    waited = fired[before] - (before + MINUTE)  # since the first slot that did not fire
    return waited > timedelta() and slot < fired[before] + min(waited, LONGEST_GAP) + LATE


def _slots(plan: Plan) -> Iterable[datetime]:
    slot = plan.moment.next_due
    if plan.removed_at is None:
        yield slot
        return
    while slot <= plan.removed_at:
        yield slot
        slot += MINUTE


def _newest_text(body: Any) -> str:
    return next(str(each["content"]) for each in reversed(body["messages"]) if each["role"] == "user")
