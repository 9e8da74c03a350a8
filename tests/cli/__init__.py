"""Tests of the command line: real processes with real exit statuses."""
