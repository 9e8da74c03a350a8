"""Scheduled work: runs the newest due slot of each entry once.

    cadence.py           slots in local time, including daylight saving time: pure arithmetic
    entry.py             an entry of the schedule: a cadence and a task
    queries.py           the statements
    ledger.py            claims a slot, renews its lease, settles it
    sweep.py             fires the entries' due slots that no worker has claimed
    reading.py           the output of `perdure schedules list`
    cron.py              slots of a cron expression, for users' schedules
    quiet.py             hours in which users' schedules do not fire
    reminders.py         users' schedules: add, list, pause, remove (`turns.inbox.fire_schedules` fires them)
    user_reminders.py    the same, for the user of one tool call
    reminder_queries.py  their statements

A message at the broker fires a slot. The slot is settled when its work is done. A duplicate or late message does no
harm, because the ledger does not run a settled slot again. A lost message does no harm either, because the sweeper of
any worker fires unclaimed slots again. Beat (`schedules`), the workers' sweeper and `tasks.scheduled` call this
package.
"""
