"""Consolidation: extracts memories from ended sessions. Called by tasks, commands and the sweeper."""
