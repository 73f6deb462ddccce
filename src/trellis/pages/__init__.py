"""The page of a run."""
