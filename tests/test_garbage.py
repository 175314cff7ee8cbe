"""Python searches for garbage rarely while the program starts, and as usual once MindSpore is set up."""

import program

THRESHOLDS = """
import gc
from flux_db import errors, garbage

def main():
    print(gc.get_threshold()[0] == garbage.RARE)
    from flux_db.model import runtime
    from flux_db.settings.schema import RuntimeConfig
    runtime.start(RuntimeConfig(device="CPU"))
    print(gc.get_threshold() == usual, gc.get_freeze_count() > 100_000)

usual = gc.get_threshold()
errors.run_guarded(main)
"""


def test_rarely_at_the_start_and_as_usual_in_the_run():
    done = program.run([program.PYTHON, "-c", THRESHOLDS])
    assert done.returncode == 0, done.stderr
    assert [word for word in done.stdout.split() if word in ("True", "False")] == ["True", "True", "True"]
