"""The command line as `python -m perdure.cli`, in the interpreter that the caller chooses."""

from perdure.cli import main

main()
