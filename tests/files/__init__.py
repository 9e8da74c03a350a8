"""Tests of the files of messages."""
