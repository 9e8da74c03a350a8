"""Flower: its settings, its authentication, and the events that it stores."""
