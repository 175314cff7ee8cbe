"""The output folder of a run."""
