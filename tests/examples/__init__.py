"""The examples, each run as its README says, over throw-away servers."""
