"""From pictures to micro-batch i."""
