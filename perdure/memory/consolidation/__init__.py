"""Consolidation: memories extracted from ended sessions. Called by tasks, commands and the sweeper."""
