"""`python -m perdure.cli`: the command line, for an interpreter that is known by its path."""

from perdure.cli import main

main()
