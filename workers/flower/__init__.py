"""Flower: its settings, its authentication, and which events it stores."""
