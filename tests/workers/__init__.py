"""Tests of the workers: consumers, publishers, installation in an application, the watchdog and the upkeep."""
