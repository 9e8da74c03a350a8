"""Tests of `perdure certify`, and the tools that they certify."""
