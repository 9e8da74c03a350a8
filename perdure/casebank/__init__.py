"""The CaseBank: questions answered before, kept as long as they serve.

A case is fed by use: it enters the context of turns that ask something like it (`search`),
each of these turns says what came of it (`executions`), and reflection sets its rate from
that (`reflection`). Once a week the policy (`policy`) says which cases go: low performers,
duplicates, sleepers. What it says is a plan (`plan`, `duplicates`), made the same way for a
dry run, which shows it, and for a run (`runs`, `prune`), which tells the administrator
(`notify`), waits for approval where that is asked for, and applies it (`apply`). Archiving
(`archive`) never deletes, and restoring brings back what was there, bit for bit.
"""

import os

# Read when numpy is first imported. A run works a share of one core; BLAS would take all of them, in bursts.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMON = "common"
"""The bank of agents that name none."""
