"""Scheduled work: when a slot is, who has taken it, and that it is done once.

    cadence.py   slots in local time, daylight saving included: pure arithmetic
    entry.py     an entry of the schedule: a cadence and the task that does the work
    queries.py   the ledger's statements
    ledger.py    one slot's life: taken, kept, settled
    sweep.py     what is due and nobody works on is fired again
    reading.py   what `perdure schedules list` shows

A slot is settled by the work, not by the firing. Whoever fires may do so twice, late or
never: the ledger decides, and the sweeper of any worker fires what nobody took.
"""
