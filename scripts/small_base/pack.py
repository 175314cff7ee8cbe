"""Put the trained networks into the package: python scripts/small_base/pack.py

fp16 safetensors of the averaged weights, under the names that diffusers and transformers give them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import arguments, load
from safetensors.torch import save_file

from flux_db.demo import tiny_model
from flux_db.model.expected_weights import expected_weights

RESULT = Path("flux_db/demo/small")


def main() -> None:
    given = arguments("Store the small model in the package.", minutes=0)
    vae, flow = load(given.work / "vae.pt"), load(given.work / "flow.pt")
    assert vae and flow, "train_vae.py and train_flow.py come first"
    vae_config = tiny_model.vae_config("small")
    factors = {"scaling_factor": flow["scale"], "shift_factor": flow["shift"]}
    assert factors.items() <= vae_config.items(), f"write these factors into VAE['small'] of tiny_model.py: {factors}"
    words = tiny_model.words_of("small")
    clip = tiny_model.clip_config("small", vocab_size=len(tiny_model.clip_vocabulary(words)[0]))
    t5 = tiny_model.t5_config("small", vocab_size=tiny_model.t5_tokenizer_object(words).get_vocab_size())
    transformer = tiny_model.transformer_config("small", vae_config, clip, t5)
    RESULT.mkdir(parents=True, exist_ok=True)
    store("vae", vae_config, vae["vae"], "")
    store("text_encoder", clip, flow["average"], "clip.")
    store("text_encoder_2", t5, flow["average"], "t5.")
    store("transformer", transformer, flow["average"], "transformer.")
    total = sum(path.stat().st_size for path in RESULT.iterdir())
    print(f"{RESULT}: {total / 1e6:.2f} MB")


def store(part: str, config: tiny_model.Config, state: dict[str, torch.Tensor], prefix: str) -> None:
    tensors = {}
    for name, shape in expected_weights(part, config).items():
        tensor = state[prefix + name]
        assert tuple(tensor.shape) == shape, (part, name, tensor.shape, shape)
        tensors[name] = tensor.half().contiguous()
    path = RESULT / f"{part}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


if __name__ == "__main__":
    main()
