"""Shutdown: signals, phases and time limits. Also standby while the intake is closed, and failures at the start."""
