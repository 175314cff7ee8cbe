"""Prepare, build, train, on one device or several."""
