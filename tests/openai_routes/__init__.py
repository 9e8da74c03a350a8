"""Tests of the OpenAI-compatible routes."""
