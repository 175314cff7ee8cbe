"""Views of a run: pages, sheets, model card, hub."""
