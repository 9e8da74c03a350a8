"""Shutdown: signals, phases and time limits. Also the drain of the fleet, and failures at the start."""
