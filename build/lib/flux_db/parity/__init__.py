"""Comparison with diffusers on torch."""
