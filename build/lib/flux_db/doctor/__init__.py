"""Whether this machine can train: small checks, before any model is loaded."""
