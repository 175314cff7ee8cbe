"""How good the samples of a run are, as numbers."""
