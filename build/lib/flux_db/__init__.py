"""FLUX.1 DreamBooth LoRA training on MindSpore."""

import os

__version__ = "0.1.0"

# Libraries read these when they are imported: errors only, and no word about the frameworks that are not there.
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
