"""Runs the command line as `python -m perdure.cli`, with the interpreter that the caller chooses."""

from perdure.cli import main

main()
