"""Tests of turns, from the accepted message to the settled reply."""
