"""Snapshots: what an agent is in the middle of, written down so that it survives its process."""
