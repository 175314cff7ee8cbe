"""Python's search for garbage: rare while the libraries are imported, as usual once work begins.

The imports make some 300,000 objects and no garbage, and take a tenth less time if Python does not search these again
and again.
"""

import gc

USUAL = gc.get_threshold()
RARE = 100_000
"""New objects until the next search."""


def search_rarely() -> None:
    gc.set_threshold(RARE)


def search_as_usual() -> None:
    """And never again among what there is by now: MindSpore searches everything before each compilation."""
    gc.freeze()
    gc.set_threshold(*USUAL)
