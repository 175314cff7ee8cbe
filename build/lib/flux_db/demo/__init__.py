"""Small models and pictures for a first run."""
