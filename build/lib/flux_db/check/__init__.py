"""Every problem, found before a model is loaded."""
