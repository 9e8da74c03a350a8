"""Tests of the agents of other libraries."""
