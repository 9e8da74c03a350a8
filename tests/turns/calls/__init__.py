"""Tests of tool calls: running, approving, awaiting and repeating them."""
