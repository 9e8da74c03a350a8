"""Crashes: real worker processes, real servers, real signals."""
