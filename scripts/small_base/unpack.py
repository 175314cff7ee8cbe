"""Go on from the stored model: python scripts/small_base/unpack.py

Writes the networks of flux_db/demo/small into the work folder as if their training had just begun a new course of the
learning rate. `train_vae.py --decoder` and `train_flow.py` then go on with them.
"""

from __future__ import annotations

import torch
from common import arguments, save
from pack import RESULT
from safetensors.torch import load_file

from flux_db.demo.tiny_model import vae_config


def main() -> None:
    given = arguments("Take the stored networks into the work folder.", minutes=0)
    save(given.work / "vae.pt", {"vae": stored("vae"), "step": 0, "spent": 0.0})
    parts = {"clip": "text_encoder", "t5": "text_encoder_2", "transformer": "transformer"}
    weights = {f"{name}.{key}": value for name, part in parts.items() for key, value in stored(part).items()}
    weights["t5.encoder.embed_tokens.weight"] = weights["t5.shared.weight"]  # torch has two names for it
    config = vae_config("small")
    factors = {"scale": config["scaling_factor"], "shift": config["shift_factor"]}
    start = {"model": weights, "average": weights, "seen": 0, "step": 0, "spent": 0.0}
    save(given.work / "flow.pt", start | factors)


def stored(part: str) -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in load_file(RESULT / f"{part}.safetensors").items()}


if __name__ == "__main__":
    main()
