"""Tests of real worker processes: crashes, signals, servers that fail."""
