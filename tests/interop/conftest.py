"""The live comparison with torch runs only where `scripts/test.sh --interop` has made a second environment."""

import os

collect_ignore_glob = [] if "FLUX_DB_TORCH_PYTHON" in os.environ else ["test_*.py"]
