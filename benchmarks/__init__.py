"""What perdure costs, measured: `make bench`, or `python -m benchmarks`.

Each section is a module with one `measure(setup)` that returns a `report.Section`. All of them
run on throw-away servers with fsync on, one after the other, so that their ratios belong to one
machine and one hour. Nothing here is imported by the rest.
"""
