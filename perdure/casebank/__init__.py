"""The CaseBank: stored questions with their answers, which enter the prompts of later turns.

- `cases`, `transfer`, `embedding`, `sharing`, `archive`: store, import, embed, share and restore cases.
- `lookup`, `search`, `vectors`: find the cases for a prompt.
- `executions`, `reflection`: record the outcome of each turn that used a case, and rate the case by these outcomes.
- `plan/`: decide which cases to archive. `runs/`: send a plan to the administrator, wait for approval, apply the plan.

Archiving deletes nothing, and an archived case can be restored bit for bit. The package `turns` searches cases and
records executions. The tasks in `tasks/casebank.py`, the HTTP routes and `perdure cases` call the other functions.
"""

import os

# numpy reads this variable on its first import. A pruning run may use a share of one core; BLAS would use all cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMON = "common"
"""The bank that an agent uses by default."""
