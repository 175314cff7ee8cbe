"""The parts of scripts/fuzz.py: cases, the server that runs them, the judge, and the families of hostile inputs."""
