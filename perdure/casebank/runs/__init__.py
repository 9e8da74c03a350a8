"""Pruning runs: plan, notify, approve, apply, report.

`prune` takes a run through its phases, `state` stores it under a lease, `apply` executes the plan, `notify` sends
notices, `pace` limits the load. The task `casebank.prune`, the HTTP routes and `perdure cases` call it.
"""
