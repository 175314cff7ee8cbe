"""FLUX.1 on a device."""
