"""Which layers are trained, of which rank and how fast: names, presets, blocks and expressions."""

import re
import time

import pytest

from flux_db.check.values import check_values
from flux_db.settings import layer_patterns, lora_layers
from flux_db.settings.schema import DEFAULT_LAYERS, LoraConfig, OptimConfig, from_flat_dict

NEEDED = {"pretrained_model_name_or_path": "model", "instance_data_dir": "pictures", "instance_prompt": "a dog"}

WIDTH, DOUBLE, SINGLE = 3072, 19, 38
IN_DOUBLE = {
    **dict.fromkeys((n for n in DEFAULT_LAYERS if n.startswith("attn.")), (WIDTH, WIDTH)),
    **{n: (WIDTH, 4 * WIDTH) for n in ("ff.net.0.proj", "ff_context.net.0.proj")},
    **{n: (4 * WIDTH, WIDTH) for n in ("ff.net.2", "ff_context.net.2")},
    **{n: (WIDTH, 6 * WIDTH) for n in ("norm1.linear", "norm1_context.linear")},
}
IN_SINGLE = {
    **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), (WIDTH, WIDTH)),
    "proj_mlp": (WIDTH, 4 * WIDTH),
    "proj_out": (5 * WIDTH, WIDTH),
    "norm.linear": (WIDTH, 3 * WIDTH),
}
FLUX = {
    **{f"transformer_blocks.{i}.{name}": shape for i in range(DOUBLE) for name, shape in IN_DOUBLE.items()},
    **{f"single_transformer_blocks.{i}.{name}": shape for i in range(SINGLE) for name, shape in IN_SINGLE.items()},
    "x_embedder": (64, WIDTH),
    "proj_out": (WIDTH, 64),
    "norm_out.linear": (WIDTH, 2 * WIDTH),
}
"""FLUX.1-dev's linear layers -> inputs, outputs; most of those in no block are left out."""


def chosen(text):
    return lora_layers.chosen(LoraConfig(lora_layers=text), FLUX)


def problems(**changes):
    return [problem.text for problem in check_values(from_flat_dict({**NEEDED, **changes}))]


@pytest.mark.parametrize(("text", "millions"), [(None, 44.8), ("default", 44.8), ("all", 85.9), ("attention", 26.1)])
def test_presets_have_as_many_parameters_as_is_known(text, millions):
    """At rank 16; 44.8 M are those of diffusers' script, 85.9 M those of all linear layers of the blocks."""
    names = chosen(text)
    assert sum(16 * sum(FLUX[name]) for name in names) / 1e6 == pytest.approx(millions, abs=0.05)
    assert "proj_out" not in names and "x_embedder" not in names, "presets are about blocks"


def test_names_mean_the_end_of_a_layers_name():
    assert len(chosen("attn.to_q")) == DOUBLE + SINGLE
    assert chosen("transformer_blocks.3.attn.to_q, x_embedder") == ["transformer_blocks.3.attn.to_q", "x_embedder"]
    assert len(chosen("proj_out")) == SINGLE + 1, "as in diffusers' script"


def test_blocks_limit_names_and_presets():
    quick = [f"single_transformer_blocks.{i}.proj_out" for i in (7, 12, 16, 20)]
    assert chosen("proj_out,single:7,12,16,20") == quick == chosen("single:7,12,16,20,proj_out")
    alone = chosen("single:7,12,16,20")
    assert len(alone) == 4 * 3 and all(name.split(".")[1] in ("7", "12", "16", "20") for name in alone)
    both = chosen("all,double:0-5,18,single:37")
    assert len(both) == 7 * len(IN_DOUBLE) + len(IN_SINGLE) and "transformer_blocks.18.norm1.linear" in both


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (",", "names no layer"),
        ("7,12", "7: is a number of no blocks; write single:7 or double:7"),
        ("single:3,attn.to_q,7", "7: is a number of no blocks"),
        ("single:x", "expects numbers of blocks"),
        ("single:", "expects numbers of blocks"),
        ("double:5-2", "ends before it begins"),
    ],
)
def test_what_is_no_choice_is_refused(text, why):
    (found,) = problems(lora_layers=text)
    assert found.startswith("--lora_layers ") and why in found


# --- expressions -------------------------------------------------------------------------------------------------


def test_the_first_expression_that_fits_counts():
    lora = LoraConfig(rank=16, lora_rank_pattern=(r"attn\.to_(q|k)=8", r"^transformer_blocks\.0\..*=4", "attn.to_q=2"))
    ranks = {name: lora_layers.rank_of(lora, name) for name in FLUX}
    assert ranks["single_transformer_blocks.0.attn.to_q"] == 8 and ranks["transformer_blocks.0.attn.to_k"] == 8
    assert ranks["transformer_blocks.0.ff.net.2"] == 4, "the whole name"
    assert ranks["single_transformer_blocks.0.proj_out"] == 16, "^ is the start of the name, single_ is not"
    assert ranks["transformer_blocks.1.attn.add_q_proj"] == 16, "from a dot on"


@pytest.mark.parametrize("expression", [r"attn\.to_(q|k)", "to_q", r".*\.attn\..*", "proj_(mlp|out)", r"[0-3]\.attn.*"])
def test_expressions_mean_what_they_mean_in_peft(expression):
    for name in FLUX:
        assert layer_patterns.fits(expression, name) == bool(re.match(rf"(.*\.)?({expression})$", name)), name


def test_alpha_by_rank_is_the_same_in_all_layers():
    lora = LoraConfig(rank=16, lora_alpha=8, lora_rank_pattern=("to_q=4",))
    assert lora_layers.alpha_of(lora, "a.to_q") == 2 and lora_layers.alpha_of(lora, "a.to_k") == 8
    plain = LoraConfig(rank=16, lora_rank_pattern=("to_q=4",))
    assert lora_layers.alpha_of(plain, "a.to_q") == 4 and lora_layers.needs_alphas(plain)
    assert not lora_layers.needs_alphas(LoraConfig(rank=16))


def test_learning_rate_factors():
    optim = OptimConfig(lora_lr_pattern=("to_q=0.5", "attn.*=2"), loraplus_ratio=16)
    factors = [
        lora_layers.rate_factor(optim, f"b.0.{n}", is_up=up) for n in ("attn.to_q", "attn.to_k", "ff") for up in (0, 1)
    ]
    assert factors == [0.5, 8, 2, 32, 1, 16]
    assert not lora_layers.has_rate_factors(OptimConfig()) and lora_layers.has_rate_factors(optim)


ENDLESS = [
    "(([a-z0-9_.]+)+)+!",
    "(a+)+",
    "(a|a)*x",
    ".*.*.*.*.*x",
    "a?" * 30 + "a" * 30,
    "(a|a)" * 30,
    "(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)(a|ab|abc)",
    "(.*|.*)(.*|.*)",
    r"(a)\1",
    "(?=a)a",
    "(?P<n>a)",
    "(" * 5000 + ")" * 5000,
    "a{1,100000}",
]


@pytest.mark.parametrize("expression", ENDLESS)
def test_expressions_that_may_never_end_are_refused(expression):
    start = time.monotonic()
    for flag in ("lora_rank_pattern", "lora_lr_pattern"):
        (found,) = problems(**{flag: (f"{expression}=4",)})
        assert found.startswith(f"--{flag} ")
    assert time.monotonic() - start < 1


def test_the_slowest_that_is_read_ends():
    expression = "(t|t|t|t|t|t|t|t).*.*x"
    assert layer_patterns.expression_problem(expression) is None
    start = time.monotonic()
    assert not any(layer_patterns.fits(expression, name.replace("x", "y")) for name in FLUX)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora_rank_pattern": ("to_q",)}, "expects EXPRESSION=VALUE"),
        ({"lora_rank_pattern": ("=4",)}, "expects EXPRESSION=VALUE"),
        ({"lora_rank_pattern": ("to_q=0",)}, "the rank must be a whole number from 1 to 4096"),
        ({"lora_rank_pattern": ("to_q=2.5",)}, "the rank must be a whole number"),
        ({"lora_rank_pattern": ("to_(q=4",)}, "has a ( without its )"),
        ({"lora_rank_pattern": ("to_q)=4",)}, "has a ) without its ("),
        ({"lora_rank_pattern": ("*to_q=4",)}, "groups cannot be repeated"),
        ({"lora_rank_pattern": ("[z-a]=4",)}, "is no expression"),
        ({"lora_lr_pattern": ("to_q=0",)}, "the factor must be a number above 0"),
        ({"lora_lr_pattern": ("to_q=nan",)}, "the factor must be a number above 0"),
        ({"loraplus_ratio": 0.0}, "must be above 0"),
        ({"loraplus_ratio": 16.0, "optimizer": "prodigy"}, "Prodigy finds one step size for all weights"),
        ({"lora_lr_pattern": ("to_q=2",), "optimizer": "prodigy"}, "Prodigy finds one step size for all weights"),
        ({"init_lora_resize": True}, "--init_lora_resize: needs --init_lora"),
        ({"init_lora_transformer_only": True}, "--init_lora_transformer_only: needs --init_lora"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, why):
    (found,) = problems(**changes)
    assert why in found and "\n" not in found
