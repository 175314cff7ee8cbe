"""Both LoRAs over two devices: the same result as on one, whose batch is as large."""

import pytest
from safetensors.numpy import load
from test_launch import finish, largest_difference, losses, start
from world import lora_bytes

RUN = {
    "lora_layers": "single_transformer_blocks.0.attn.to_q",
    "train_text_encoder": True,
    "text_encoder_lr": 1e-2,
    "text_encoder_steps": 3,
    "caption_dropout": 0.3,
    "max_train_steps": 5,
    "checkpointing_steps": 5,
}


def test_two_devices_train_both_loras_as_one_does(world, tmp_path):
    """The ranks' weights and moments are compared bit by bit when the checkpoint is saved."""
    for devices in (1, 2):
        settings = world.settings(tmp_path / str(devices), train_batch_size=4 // devices, **RUN)
        process = start(settings, devices=devices)
        text = finish(process)
        assert process.returncode == 0, text[-3000:]
    one, two = tmp_path / "1", tmp_path / "2"
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    difference = largest_difference(one, two)
    print(f"largest difference of a weight {difference:.1e}")
    assert difference <= 1e-5
    moved = {name: abs(value).max() for name, value in load(lora_bytes(two)).items() if "text_encoder." in name}
    assert len(moved) == 16 and all(value > 1e-3 for value in moved.values())
