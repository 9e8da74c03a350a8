"""`python -m workers.commands`: the command line, for an interpreter that is known by its path."""

from workers.commands import main

main()
