"""The CaseBank: stored questions with their answers, which enter the prompts of later turns.

- `cases`, `transfer`, `embedding`, `sharing`, `archive`: store, import, embed, share and restore cases.
- `lookup`, `search`, `vectors`: find the cases for a prompt.
- `executions`, `reflection`: record the outcome of each turn that used a case, and set the case's rate from it.
- `plan/`: decide which cases to archive. `runs/`: notify the administrator of a plan, wait for approval, apply it.

Archiving deletes nothing, and an archived case can be restored bit for bit. `turns` searches and records executions;
the tasks in `tasks/casebank.py`, the HTTP routes and `perdure cases` call the rest.
"""

import os

# numpy reads this on its first import. A run is limited to a share of one core; BLAS would use all cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

COMMON = "common"
"""The bank of agents that name no bank."""
