"""Every setting: declared, read, resolved."""
