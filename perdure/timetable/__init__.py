"""Scheduled work: runs tasks at fixed times, and sends users' messages at times that users choose.

An entry of the schedule names a task and a cadence, the times at which the task is due. Each of these times is a slot.
If several slots of an entry were missed, only the newest runs.

    cadence.py           computes an entry's slots in UTC or local time, including daylight saving time
    entry.py             an entry of the schedule: a cadence and a task
    queries.py           the SQL statements for entries and slots
    ledger.py            claims a slot, renews the slot's lease, settles the slot
    sweep.py             fires due slots of entries that no worker has claimed
    reading.py           the status of each entry, for `perdure schedules list`
    cron.py              computes slots from a cron expression, for users' schedules
    quiet.py             hours in which users' schedules do not fire
    reminders.py         users' schedules: add, list, pause, remove (`turns.inbox.fire_schedules` fires them)
    user_reminders.py    one user's schedules, for the tools that add, list and remove them
    reminder_queries.py  the SQL statements for users' schedules

Celery's beat (`schedules`) or a worker's sweeper fires a slot: it publishes a task message to the broker. The worker
that receives the message claims the slot, runs the task, and then settles the slot. A duplicate or late message does no
harm, because the ledger never runs a settled slot again. A lost message does no harm, because the sweeper fires
unclaimed slots again.
"""
