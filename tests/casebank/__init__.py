"""The CaseBank."""
