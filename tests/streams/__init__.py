"""Tests of the event streams of turns, and of waiting until a turn is settled."""
