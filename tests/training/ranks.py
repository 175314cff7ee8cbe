"""The training script with something wrong on rank 1; started by msrun in place of the real one (test_launch.py)."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def nan_in_step_two_and_other_weights_after_step_three() -> None:
    import numpy as np
    from mindspore import ops

    from flux_db.data.batches import BatchSource
    from flux_db.model import adapter
    from flux_db.training.loop import Loop

    right_batch, right_finish = BatchSource.__getitem__, Loop._finish

    def batch(self, i):
        inputs = right_batch(self, i)
        return inputs._replace(noise=np.full_like(inputs.noise, np.nan)) if i == 1 else inputs

    def finish(self, pending):
        right_finish(self, pending)
        if pending.step == 3:
            weight = next(iter(adapter.parameters(self.training.transformer).values()))
            ops.assign(weight, weight * (1 + 1e-6))

    BatchSource.__getitem__, Loop._finish = batch, finish


if __name__ == "__main__":
    if os.environ["MS_ROLE"] == "MS_WORKER" and os.environ["RANK_ID"] == "1":
        globals()[os.environ["WRONG"]]()
    import train_dreambooth_lora_flux as script
    from flux_db.errors import run_guarded

    sys.exit(run_guarded(lambda: script.main(sys.argv[1:])))
