"""--shard_base in two processes: what a rank loads, and that it computes what one process does.

python tests/model/sharded_load.py MODEL LOG_FOLDER; it starts itself twice under msrun.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def start_both(model: str, logs: str) -> int:
    from flux_db.training.launch import Devices, Supervisor

    with Supervisor(Path(logs)) as supervisor:
        return supervisor.run_workers([__file__, model, logs], Devices(devices=2), 0)


def compare(model: Path) -> None:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    from flux_db.model import adapter, loading, runtime, sharding
    from flux_db.settings.schema import LoraConfig, RuntimeConfig

    here = runtime.start(RuntimeConfig(device="CPU", mixed_precision="fp16"))
    lora = LoraConfig(rank=4, lora_layers="attn.to_q,ff.net.2")

    ours = loading.load_transformer(model, here.dtype, None, sharding.share_of(here))
    adapter.inject(ours, lora, seed=0)
    whole, kept = sharding.shard_base(ours, here)
    assert whole == sum(p.size for p in whole_network(model, lora).get_parameters()) and 0.45 < kept / whole < 0.6

    alone = whole_network(model, lora)
    wanted = dict(alone.parameters_and_names())
    assert list(dict(ours.parameters_and_names())) == list(wanted)
    for name, part in ours.parameters_and_names():
        value = wanted[name].asnumpy()
        is_matrix = value.ndim == 2 and "lora" not in name
        assert part.sliced == is_matrix, name
        rows = len(value) // 2
        mine = value[here.rank * rows :][:rows] if is_matrix else value
        assert part.asnumpy().tobytes() == mine.tobytes(), name

    generator = np.random.default_rng(here.rank)

    def random(*shape: int) -> Tensor:
        return Tensor(generator.standard_normal(shape), ms.float16)

    inputs = {
        "hidden_states": random(1, 4, 64),
        "encoder_hidden_states": random(1, 8, 48),
        "pooled_projections": random(1, 32),
        "timestep": Tensor([0.5], ms.float16),
        "img_ids": Tensor(np.zeros((4, 3)), ms.float16),
        "txt_ids": Tensor(np.zeros((8, 3)), ms.float16),
        "guidance": Tensor([3.5], ms.float32),
    }

    def answer(network) -> np.ndarray:
        return network(**inputs, return_dict=False)[0].asnumpy()

    mine = answer(ours)
    assert np.isfinite(mine).all() and mine.tobytes() == answer(alone).tobytes()

    # int8: a part of each matrix, gathered and made whole, is what one process computes with
    spread = loading.load_transformer(model, here.dtype, None, sharding.share_of(here), is_int8=True)
    sharding.shard_base(spread, here)
    mine = answer(spread)
    alone = loading.load_transformer(model, here.dtype, is_int8=True)
    assert np.isfinite(mine).all() and mine.tobytes() == answer(alone).tobytes()
    print("the same", flush=True)


def whole_network(model: Path, lora):
    import mindspore as ms

    from flux_db.model import adapter, loading

    network = loading.load_transformer(model, ms.float16)
    adapter.inject(network, lora, seed=0)
    return network


if __name__ == "__main__":
    if "MS_ROLE" in os.environ:
        sys.exit(compare(Path(sys.argv[1])))
    sys.exit(start_both(*sys.argv[1:]))
