"""The prompt of a turn: instructions, summary, history, recall and cases, each within its budget.

`build` asks memory and the CaseBank, and makes the parts. `parts` fits them into their budgets.
"""
