"""Tests of the runner: model calls, commits, snapshots, hooks and failures of a turn."""
