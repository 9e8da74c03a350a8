"""Tests of the prompt: which turns, memories and events it contains."""
