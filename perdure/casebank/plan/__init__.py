"""The pruning plan: which cases to remove, merge, archive or spare, and why. Writes nothing to the database.

`compute` makes the plan from the rules in `policy` and the pairs from `duplicates`. `casebank.runs` calls `compute`.
"""
