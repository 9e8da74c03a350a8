"""The pruning plan: which cases to remove, merge, archive or spare, and why. Writes nothing to the database.

`compute` makes the plan from the rules in `policy` and the pairs from `duplicates`. `packed_cases` and
`temporary_files` limit the memory that planning takes. `casebank.runs` calls `compute`.
"""
