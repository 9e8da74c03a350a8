"""Tests of agents of pydantic-ai, run by perdure's turns."""
