"""Tests of the web chat: a real browser, and real gateway and worker processes."""
