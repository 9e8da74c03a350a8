"""Tests of event streams: what workers write, and what clients receive from any position, under faults."""
