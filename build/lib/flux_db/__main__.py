"""`python -m flux_db COMMAND`: what there is besides training."""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules first in the user's folder, or in this one if started by its path. What lies there must
    # not take the place of a library, so the package is imported from where it is, and the rest from elsewhere.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import flux_db  # noqa: F401

    del sys.path[0]

from flux_db.commands.table import main

if __name__ == "__main__":
    sys.exit(main())
