"""Pruning runs: plan, notify, approve, apply, report.

`prune` takes a run through its phases. `state` stores the run under a lease, `apply` executes the plan, and `notify`
sends notices. The task `casebank.prune`, the HTTP routes and `perdure cases` call this package.
"""
