"""Pruning runs: plan, notify, approve, apply, report."""
