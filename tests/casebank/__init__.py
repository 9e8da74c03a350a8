"""Tests of the CaseBank, which stores answered questions for later turns."""
