"""The settings of the text encoder's LoRA: what they mean, and what is refused."""

import pytest

from flux_db.check.values import check_values
from flux_db.settings.derived import text_lora
from flux_db.settings.lora_layers import layer_names
from flux_db.settings.schema import TEXT_ENCODER_LAYERS, from_flat_dict

NEEDED = {"pretrained_model_name_or_path": "model", "instance_data_dir": "pictures", "instance_prompt": "a dog"}


def config(**changes):
    return from_flat_dict({**NEEDED, **changes})


def problems(**changes):
    return [problem.text for problem in check_values(config(**changes))]


def test_off_there_is_none():
    assert text_lora(config()) is None and problems() == []


def test_it_is_as_strong_as_the_transformers():
    lora = text_lora(config(train_text_encoder=True, rank=16, lora_alpha=24.0, text_encoder_rank=4, lora_dropout=0.1))
    assert (lora.rank, lora.alpha, lora.lora_dropout) == (4, 6.0, 0.1)
    assert layer_names(lora) == ("q_proj", "k_proj", "v_proj", "out_proj")
    plain = text_lora(config(train_text_encoder=True, text_encoder_layers="all"))
    assert (plain.rank, plain.alpha, plain.lora_alpha) == (16, 16, None) and layer_names(plain) == TEXT_ENCODER_LAYERS


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"text_encoder_lr": 1e-4}, "--text_encoder_lr 0.0001: needs --train_text_encoder"),
        ({"text_encoder_rank": 4}, "--text_encoder_rank 4: needs --train_text_encoder"),
        ({"text_encoder_steps": 9}, "--text_encoder_steps 9: needs --train_text_encoder"),
        ({"adam_weight_decay_text_encoder": 0.1}, "needs --train_text_encoder"),
        ({"train_text_encoder": True, "text_encoder_layers": "q_prj"}, "did you mean q_proj?"),
        ({"train_text_encoder": True, "text_encoder_layers": "all,fc1"}, "expects all, or some of q_proj, k_proj"),
        ({"train_text_encoder": True, "text_encoder_layers": ","}, "expects all, or some of"),
        ({"train_text_encoder": True, "text_encoder_lr": 0.0}, "must be above 0"),
        ({"train_text_encoder": True, "text_encoder_rank": 0}, "must be from 1"),
        ({"train_text_encoder": True, "text_encoder_steps": 0}, "must be from 1"),
        (
            {"train_text_encoder": True, "optimizer": "prodigy", "text_encoder_lr": 1e-4},
            "--text_encoder_lr 0.0001: Prodigy finds one step size for both LoRAs",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes, text):
    (found,) = problems(**changes)
    assert text in found and "\n" not in found


def test_a_preserved_class_is_meaningful():
    """CLIP sees the class prompt too, and the class pictures hold it back as they hold the transformer."""
    prior = {"with_prior_preservation": True, "class_data_dir": "class", "class_prompt": "a photo of a dog"}
    assert problems(train_text_encoder=True, **prior) == []
    assert problems(train_text_encoder=True, optimizer="prodigy") == []
