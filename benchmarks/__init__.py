"""perdure's benchmarks: `make bench`, or `python -m benchmarks`.

Each section is a module whose function `measure(setup)` returns a `report.Section`. The sections
run one after the other, on the same throw-away servers with fsync on, so that their figures are
comparable. perdure itself imports nothing from this package.
"""
