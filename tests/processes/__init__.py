"""Tests with real worker processes: crashes, signals and server failures."""
