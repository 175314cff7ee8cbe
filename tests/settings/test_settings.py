"""Settings: where they come from, what is refused, and with which words."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import yaml
from world import split_weights

from flux_db.check.bounds import BOUNDS
from flux_db.check.files import check_files
from flux_db.check.values import check_values
from flux_db.demo.tiny_model import draw_all, vae_config, write_tiny_model
from flux_db.errors import UserError, run_guarded
from flux_db.problem import Problem
from flux_db.settings.command_line import build_parser, parse_config, read_config, read_flags, to_yaml
from flux_db.settings.derived import background, cache_path, global_batch, validation_prompts
from flux_db.settings.peer_flags import PEER_FLAGS
from flux_db.settings.schema import SECTIONS, Config, from_flat_dict, to_flat_dict, with_defaults

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
REQUIRED = [
    *("--pretrained_model_name_or_path", "black-forest-labs/FLUX.1-dev"),
    *("--instance_data_dir", "pictures"),
    *("--instance_prompt", "a photo of sks dog"),
]

# Flags are a promise to users' scripts: taking one away or renaming it has to be done here as well.
FLAG_NAMES = """
pretrained_model_name_or_path revision variant cache_dir
instance_data_dir instance_prompt class_data_dir class_prompt with_prior_preservation prior_loss_weight num_class_images
concepts dataset_name dataset_config_name image_column caption_column trigger_word alpha_background
preserve_class preserve_weight
max_sequence_length resolution center_crop random_flip repeats sample_batch_size cache_latents encode_cache_dir
dataloader_num_workers
aspect_ratio_buckets max_buckets cache_crops mask_dir alpha_mask unmasked_weight caption_dropout
rank lora_rank lora_alpha lora_dropout lora_compute lora_layers
lora_rank_pattern init_lora init_lora_resize init_lora_transformer_only lora_lr_pattern loraplus_ratio
train_text_encoder text_encoder_lr adam_weight_decay_text_encoder text_encoder_rank text_encoder_layers
text_encoder_steps
guidance_scale weighting_scheme logit_mean logit_std timestep_sampling sigmoid_scale flow_shift mode_scale
loss huber_delta huber_schedule
train_batch_size gradient_accumulation_steps num_train_epochs max_train_steps max_train_minutes optimizer learning_rate
scale_lr
lr_scheduler lr_warmup_steps lr_num_cycles lr_power
adam_beta1 adam_beta2 adam_weight_decay adam_epsilon max_grad_norm ema_decay
validation_prompt validation_prompts_file num_validation_images validation_epochs validation_steps validation_size
validation_inference_steps validation_guidance vae_tiling validation_seed validation_data_dir validation_share keep_best
score_steps score_dino score_clip early_stop_patience
output_dir dry_run
seed checkpointing_steps checkpoints_total_limit resume_from_checkpoint allow_changed max_skipped_steps
upcast_before_saving ema_export report_to logging_dir
push_to_hub hub_model_id hub_private
device mixed_precision base_precision gradient_checkpointing jit_level distributed shard_base deterministic
compile_cache compile_cache_dir
"""
FLAGS = FLAG_NAMES.split()


def parse(*flags: str) -> Config:
    return parse_config([*REQUIRED, *flags], checks=(check_values,))


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse_config(list(argv), checks=(check_values,))
    return every_flag_is_listed(caught.value.problems)


def every_flag_is_listed(problems: list[str]) -> list[str]:
    # a problem that depends on a setting that could not be read is left out; so a problem must list its settings
    for problem in problems:
        named = {name.removeprefix("no-") for name in re.findall(r"--([\w-]+)", problem)} & set(FLAGS)
        if isinstance(problem, Problem) and problem.flags:
            assert named <= problem.flags, (problem, problem.flags)
    return problems


def problems_with(*flags: str) -> list[str]:
    return problems_of(*REQUIRED, *flags)


@pytest.fixture
def write_yaml(tmp_path):
    def write(text: str) -> str:
        file = tmp_path / "run.yaml"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


# --- pictures: a folder or a dataset --------------------------------------------------------------------------------

WITHOUT_PICTURES = [*REQUIRED[:2], *REQUIRED[4:]]


def test_exactly_one_source_of_pictures(write_yaml):
    (problem,) = problems_of(*WITHOUT_PICTURES)
    assert problem == ("--instance_data_dir or --dataset_name is required: say where the pictures of the subject are")
    (problem,) = problems_with("--dataset_name", "owner/dogs")
    assert problem == "--dataset_name owner/dogs: not together with --instance_data_dir; leave one out"
    data = parse_config([*WITHOUT_PICTURES, "--dataset_name", "owner/dogs", "--caption_column", "text"]).data
    assert (data.dataset_name, data.instance_data_dir, data.image_column) == ("owner/dogs", None, "image")


@pytest.mark.parametrize(
    ("given", "other"), [("dataset_name", "instance_data_dir"), ("instance_data_dir", "dataset_name")]
)
def test_the_source_on_the_command_line_takes_the_place_of_the_one_in_yaml(write_yaml, given, other):
    file = write_yaml(f"{other}: from/yaml\n")
    data = parse_config([*WITHOUT_PICTURES, "--config", file, f"--{given}", "from/line"]).data
    assert (getattr(data, given), getattr(data, other)) == ("from/line", None)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--image_column=img"], "--image_column img: needs --dataset_name; add that or leave --image_column out"),
        (["--caption_column=t"], "--caption_column t: needs --dataset_name; add that or leave --caption_column out"),
        (["--instance_prompt=a {trigger}"], "--instance_prompt a {trigger}: needs --trigger_word, which takes the"),
        (["--validation_prompt=a [trigger]"], "--validation_prompt a [trigger]: needs --trigger_word"),
        (["--trigger_word={trigger}"], "--trigger_word {trigger}: must be a word of its own"),
        (
            ["--with_prior_preservation", "--class_data_dir=c", "--class_prompt={trigger}", "--trigger_word=x"],
            "--class_prompt {trigger}: names the class, so without {trigger}",
        ),
        (["--alpha_background=blurple"], "--alpha_background blurple: no colour; give a name such as grey, or #rrggbb"),
        (["--alpha_background=#12345678"], "--alpha_background #12345678: no colour"),
    ],
)
def test_what_is_refused_about_pictures_and_captions(flags, problem):
    (found,) = problems_with(*flags)
    assert found.startswith(problem)


@pytest.mark.parametrize(
    ("text", "colour"),
    [("white", (255, 255, 255)), ("Grey", (128, 128, 128)), ("#3366cc", (51, 102, 204)), (" #FFF ", (255, 255, 255))],
)
def test_colours(text, colour):
    assert background(parse("--alpha_background", text)) == colour


def test_settings_that_an_older_version_did_not_know_are_at_their_defaults():
    old = {name: value for name, value in to_flat_dict(parse()).items() if name not in ("trigger_word", "repeats")}
    assert with_defaults(old) == to_flat_dict(parse())
    assert with_defaults(old | {"repeats": 3})["repeats"] == 3


# --- sources ---------------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_yaml_which_overrides_the_defaults(write_yaml):
    file = write_yaml("rank: 8\nresolution: 256\nvalidation_prompt: [a, b]\ncache_latents: false\n")
    config = parse("--config", file, "--rank", "4", "--validation_prompt", "c", "--cache_latents")
    assert (config.lora.rank, config.data.resolution, config.output.seed) == (4, 256, 42)
    assert config.validation.validation_prompt == ("c",)
    assert config.data.cache_latents is True


def test_the_position_of_config_on_the_command_line_does_not_matter(write_yaml):
    file = write_yaml("rank: 8")
    assert parse("--rank", "4", f"--config={file}").lora.rank == 4


def test_yaml_may_hold_the_required_settings(write_yaml):
    file = write_yaml("pretrained_model_name_or_path: a/b\ninstance_data_dir: c\ninstance_prompt: d\n")
    assert parse_config(["--config", file]).data.instance_prompt == "d"


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("learning_rate: 1e-4", "learning_rate", 1e-4),  # text to YAML
        ("learning_rate: 1", "learning_rate", 1.0),
        ("mixed_precision: no", "mixed_precision", "no"),  # false to YAML
        ("optimizer: AdamW", "optimizer", "adamw"),
        ("device: ascend", "device", "Ascend"),
        ("lora_rank: 5", "rank", 5),
        ("validation_prompt: one", "validation_prompt", ["one"]),
        ("validation_prompt: [one, two]", "validation_prompt", ["one", "two"]),
        ("validation_epochs: null", "validation_epochs", 50),
        ("random_flip: yes", "random_flip", True),
        ("output_dir: ~/runs", "output_dir", "/home/rex/runs"),
        ("", "rank", 16),
    ],
)
def test_what_people_write_in_yaml(write_yaml, monkeypatch, line, name, value):
    monkeypatch.setenv("HOME", "/home/rex")
    read = to_flat_dict(parse("--config", write_yaml(line)))[name]
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--lora_rank", "5"], "rank", 5),
        (["--rank=5"], "rank", 5),
        (["--no-cache_latents"], "cache_latents", False),
        (["--with_prior_preservation", "--class_data_dir=c", "--class_prompt=d"], "with_prior_preservation", True),
        (["--weighting_scheme", "logit_normal", "--logit_mean", "-0.5"], "logit_mean", -0.5),
        (["--optimizer", "AdamW"], "optimizer", "adamw"),
        (["--validation_prompt", "a", "--validation_prompt", "b"], "validation_prompt", ["a", "b"]),
        (["--instance_prompt", "-- an odd one"], "instance_prompt", "-- an odd one"),
    ],
)
def test_what_people_write_on_the_command_line(flags, name, value):
    assert to_flat_dict(parse(*flags))[name] == value


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_config_in_the_repository_is_sound_and_names_its_own_command(file):
    parse_config(["--config", str(file)])
    assert f"--config configs/{file.name}" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [file for file in CONFIGS if "concepts" not in file.name], ids=lambda file: file.stem)
def test_samples_of_a_config_follow_the_prompt_that_was_typed(file):
    config = read_config(["--config", str(file), "--instance_prompt", "a photo of zwx bird"]).config
    prompts = validation_prompts(config)
    assert prompts[0].startswith("a photo of zwx bird ") and not any("sks" in text or "{" in text for text in prompts)


def test_the_configs_of_the_readme_are_there():
    assert [file.stem for file in CONFIGS] == [
        "demo_cpu", "flux_dev_32gb", "flux_dev_32gb_8devices", "flux_dev_64gb", "flux_dev_64gb_concepts",
        "flux_dev_64gb_prior",
        "flux_dev_8devices", "my_drawings_cpu",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--config", str(CONFIGS[3]), "--seed", "7", "--lora_alpha", "2.5", "--allow_changed", "rank,seed"],
        ["--instance_prompt", "yes: ein #Hündchen\n'", "--validation_prompt", "null", "--learning_rate", "1e-10"],
    ],
)
def test_a_config_survives_yaml_and_json(write_yaml, flags):
    config = parse(*flags)
    assert parse_config(["--config", write_yaml(to_yaml(config))]) == config
    assert from_flat_dict(json.loads(json.dumps(to_flat_dict(config)))) == config


def test_no_setting_can_be_lost_as_null_in_yaml():
    # null means "leave at default", so a setting that may be None must have None as its default.
    values = with_defaults({})
    assert all(values[name] is None for name, flag in read_flags().items() if "None" in str(flag.annotation))


def test_yaml_output_has_a_heading_for_every_section():
    headings = [line for line in to_yaml(parse()).splitlines() if line.startswith("# ")]
    assert len(headings) == len(SECTIONS)


def test_from_flat_dict_names_what_it_does_not_know_and_what_it_misses():
    with pytest.raises(UserError) as caught:
        from_flat_dict({"instance_prompt": "a", "instance_data_dir": "b", "sed": 3})
    assert caught.value.problems == [
        "sed: no such setting; did you mean seed?",
        "pretrained_model_name_or_path: the setting is missing",
    ]


# --- flags and help --------------------------------------------------------------------------------------------------


def test_the_flags_are_frozen():
    flags = read_flags().values()
    assert sorted(name for flag in flags for name in (flag.name, *flag.aliases)) == sorted(FLAGS)


@pytest.fixture
def help_text(capsys, monkeypatch):
    def read(flag: str) -> str:
        monkeypatch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as caught:
            parse_config([flag])
        assert caught.value.code == 0
        return capsys.readouterr().out

    return read


def test_help_shows_what_most_runs_set(help_text):
    text = help_text("--help")
    shown = {flag for flag in FLAGS if re.search(rf"^  (--\w+, )?--{flag}\b", text, re.MULTILINE)}
    assert shown == {
        *("pretrained_model_name_or_path", "instance_data_dir", "instance_prompt", "resolution"),
        *("rank", "lora_rank", "train_batch_size", "max_train_steps", "learning_rate"),
        *("validation_prompt", "validation_steps", "output_dir", "checkpointing_steps", "resume_from_checkpoint"),
        *("mixed_precision", "gradient_checkpointing"),
    }
    assert f"--help-all                    show all {len(read_flags())} flags" in text


def test_help_all_is_grouped_and_shows_every_flag_with_its_default_and_choices(help_text):
    text = help_text("--help-all")
    for section in SECTIONS.values():
        assert f"\n{section.__doc__}:\n" in text
    assert all(f"--{flag}" in text for flag in FLAGS)
    assert "--rank, --lora_rank N" in text
    assert "(default: 16)" in text and "(required)" in text and "{auto,Ascend,CPU}" in text


@pytest.mark.parametrize("flag", read_flags().values(), ids=lambda flag: flag.name)
def test_every_flag_explains_itself_in_a_sentence(flag):
    assert flag.help.endswith(".") and len(flag.help.split()) >= 3


def test_help_speaks_of_the_hardware_there_is():
    words = build_parser(whole_help=True).format_help().lower()
    assert not [word for word in ("cuda", "gpu", "nvidia", "ampere", "torch") if word in words]


# --- refusals --------------------------------------------------------------------------------------------------------


PRIOR = ["--with_prior_preservation", "--class_data_dir", "c", "--class_prompt", "a dog"]
PRODIGY = ["--optimizer", "prodigy"]


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["--use_8bit_adam"], []),
        (["--allow_tf32"], []),
        (["--local_rank", "-1"], []),
        (["--mindspore_mode", "0"], []),
        (["--mindspore_mode=1"], []),
        (["--enable_mindspore_data_sink"], []),
        (["--enable_xformers_memory_efficient_attention"], []),
        (["--enable_npu_flash_attention"], []),
        (["--zero_stage", "0"], []),
        (["--zero_stage=2"], []),
        (["--prior_generation_precision", "bf16"], []),
        (["--prior_generation_precision", "fp32"], PRIOR),
        (["--prior_generation_precision", "bf16"], [*PRIOR, "--mixed_precision", "bf16"]),
        (["--prodigy_decouple", "False"], []),
        (["--prodigy_decouple", "True"], PRODIGY),
        (["--prodigy_beta3", "0.9"], []),
        (["--prodigy_beta3", "None"], PRODIGY),
        (["--prodigy_beta3", "0.99499"], [*PRODIGY, "--adam_beta2", "0.99"]),
    ],
)
def test_a_flag_of_the_peers_that_changes_nothing_here_is_a_line(words, others):
    given = read_config([*REQUIRED, *others, *words])
    assert given.problems == ()
    (line,) = given.ignored
    assert line.startswith(f"{words[0].partition('=')[0]} is ignored: ")
    assert given.config == parse_config([*REQUIRED, *others])


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["--zero_stage", "3"], []),
        (["--prior_generation_precision", "fp16"], PRIOR),
        (["--prodigy_decouple", "False"], PRODIGY),
        (["--prodigy_use_bias_correction=False"], PRODIGY),
        (["--prodigy_safeguard_warmup", "0"], PRODIGY),
        (["--prodigy_beta3", "0.9"], PRODIGY),
        (["--hub_token", "secret"], []),
    ],
)
def test_a_flag_of_the_peers_that_would_change_the_result_is_refused(words, others):
    (problem,) = problems_with(*others, *words)
    flag = words[0].partition("=")[0]
    assert problem == f"{flag}: not used here: {PEER_FLAGS[flag[2:]].reason}; {PEER_FLAGS[flag[2:]].instead}"


def test_flags_of_the_peers_in_a_file(write_yaml):
    file = write_yaml("allow_tf32: true\nzero_stage: 0\n")
    lines = read_config([*REQUIRED, "--config", file]).ignored
    assert [line.split(" is ")[0] for line in lines] == [f"{file}: allow_tf32", f"{file}: zero_stage"]
    file = write_yaml("zero_stage: 3")
    assert problems_with("--config", file)[0].startswith(f"{file}: zero_stage: not used here: ")


def test_no_flag_both_is_a_setting_and_belongs_to_others():
    assert not set(PEER_FLAGS) & set(FLAGS)


def test_a_name_that_people_try_stands_for_one_setting():
    near = [name for flag in read_flags().values() for name in flag.near]
    assert len(set(near)) == len(near) and not set(near) & {*FLAGS, *PEER_FLAGS}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--learning-rate", "1"], "--learning-rate: no such setting; did you mean --learning_rate?"),
        (["--no_cache_latents"], "--no_cache_latents: no such setting; did you mean --no-cache_latents?"),
        (["--res", "512"], "--res: no such setting; did you mean --resolution?"),
        (["--lr", "1"], "--lr: no such setting; did you mean --learning_rate?"),
        (["--lrs", "1"], "--lrs: no such setting; did you mean --learning_rate?"),
        (["--steps", "1"], "--steps: no such setting; did you mean --max_train_steps?"),
        (["--batch_size", "1"], "--batch_size: no such setting; did you mean --train_batch_size?"),
        (["--epochs", "1"], "--epochs: no such setting; did you mean --num_train_epochs?"),
        (["--data_dir", "1"], "--data_dir: no such setting; did you mean --instance_data_dir?"),
        (["--network-dim", "1"], "--network-dim: no such setting; did you mean --rank?"),
        (["--xyzzy"], "--xyzzy: no such setting"),
        (["--rank"], "--rank: needs a value; one that starts with a dash is written with =, as in --flag=-x"),
        (["--rank", "1.5"], "--rank: expects a whole number, not '1.5'"),
        (["--learning_rate", "fast"], "--learning_rate: expects a number, not 'fast'"),
        (["--learning_rate", "nan"], "--learning_rate: expects a finite number, not 'nan'"),
        (["--device", "TPU"], "--device: expects one of auto, Ascend, CPU, not TPU"),
        (
            ["--report_to", "wandbb"],
            "--report_to wandbb: expects tensorboard, wandb, swanlab or none; did you mean wandb?",
        ),
        (["--report_to", "none,wandb"], "--report_to: none excludes wandb; leave one out"),
        (["--cache_latents=true"], "--cache_latents takes no value; write --cache_latents or --no-cache_latents"),
        (["--config"], "--config needs the path of a YAML file"),
        (["--config", "nowhere.yaml"], "--config nowhere.yaml: cannot be read: No such file or directory"),
        (
            ["--instance_prompt", "a", "photo", "of"],
            "words that belong to no flag: photo of; a value with spaces goes in quotes, and a switch takes no value",
        ),
    ],
)
def test_a_slip_on_the_command_line(flags, problem):
    assert problems_with(*flags) == [problem]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("resolutoin: 512", "{file}: resolutoin: no such setting; did you mean resolution?"),
        ("lr: 1", "{file}: lr: no such setting; did you mean learning_rate?"),
        ("rank: sixteen", "{file}: rank: expects a whole number, not 'sixteen'"),
        ("rank: true", "{file}: rank: expects a whole number, not True"),
        ("rank: 1.5", "{file}: rank: expects a whole number, not 1.5"),
        ("learning_rate: [1]", "{file}: learning_rate: expects a number, not [1]"),
        ("cache_latents: 'on'", "{file}: cache_latents: expects true or false, not 'on'"),
        ("revision: 123", "{file}: revision: expects text, not 123; put it in quotes"),
        ("validation_prompt: [a, 1]", "{file}: validation_prompt: expects text, not 1; put it in quotes"),
        ("rank: 4\nlora_rank: 8", "{file}: lora_rank: is another name of rank, which is given as well; keep one"),
        ("rank: 4\nrank: 8", "--config {file}: not valid YAML at line 2: rank is given twice"),
        ("rank: [4", "--config {file}: not valid YAML at line 1: expected ',' or ']', but got '<stream end>'"),
        ("- rank", "--config {file}: expects lines of the form name: value"),
    ],
)
def test_a_slip_in_yaml_names_file_and_key(write_yaml, text, problem):
    file = write_yaml(text)
    assert problems_with("--config", file) == [problem.format(file=file)]


def test_yaml_that_is_no_text(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert problems_with("--config", str(file)) == [f"--config {file}: not a text file in UTF-8"]


def test_all_problems_are_told_at_once(write_yaml):
    file = write_yaml("resolutoin: 512\nrank: many\ninstance_prompt: a dog\ninstance_data_dir: pictures\n")
    assert problems_of(
        *("--config", file, "--zero_stage", "3", "--xyzzy", "--lora_dropout", "2"),
        *("--lr_warmup_steps", "5", "--seed", "x", "--lr_scheduler", "sine"),
    ) == [
        "--xyzzy: no such setting",
        f"{file}: resolutoin: no such setting; did you mean resolution?",
        "--zero_stage: not used here: a LoRA's gradients and optimizer state are small and not sharded; for stage 3 use"
        " --shard_base, which shards the frozen transformer",
        f"{file}: rank: expects a whole number, not 'many'",
        "--lr_scheduler: expects one of linear, cosine, cosine_with_restarts, polynomial, constant,"
        " constant_with_warmup, not sine",
        "--seed: expects a whole number, not 'x'",
        "--pretrained_model_name_or_path is required: Folder of a FLUX.1 model in diffusers layout, or its name on the"
        " hub, such as black-forest-labs/FLUX.1-dev.",
        "--lora_dropout 2.0: must be 0 or more and below 1",
        # Nothing about --lr_warmup_steps with the default scheduler: the user did not ask for that scheduler.
    ]


def test_more_checks_can_be_told_together_with_the_rest():
    with pytest.raises(UserError) as caught:
        parse_config([*REQUIRED, "--rank", "0"], checks=(check_values, check_files))
    assert caught.value.problems == [
        "--rank 0: must be from 1 to 4096",
        "--instance_data_dir pictures: no such folder; check the path",
    ]


def test_a_user_error_ends_a_program_with_code_2_and_no_traceback(capsys):
    def fail(problems):
        raise UserError(problems)

    assert run_guarded(lambda: fail("one")) == 2
    assert capsys.readouterr().err == "error: one\n"
    assert run_guarded(lambda: fail(["one", "two"])) == 2
    assert capsys.readouterr().err == "error: 2 problems\n- one\n- two\n"
    assert (run_guarded(lambda: None), run_guarded(lambda: 3)) == (0, 3)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--rank=0"], "--rank 0: must be from 1 to 4096"),
        (["--max_train_steps=0"], "--max_train_steps 0: must be from 1 to 10000000"),
        (["--validation_steps=0"], "--validation_steps 0: must be from 1 to 1000000000"),
        (["--prior_loss_weight=-1"], "--prior_loss_weight -1.0: must be from 0 to 1000000"),
        (["--learning_rate=0"], "--learning_rate 0.0: must be above 0, up to 1000"),
        (["--timestep_sampling=sigmoid", "--sigmoid_scale=400"], "--sigmoid_scale 400.0: must be above 0, up to 10"),
        (["--timestep_sampling=shift", "--flow_shift=200"], "--flow_shift 200.0: must be above 0, up to 100"),
        (["--weighting_scheme=logit_normal", "--logit_mean=-800"], "--logit_mean -800.0: must be from -10 to 10"),
        (["--weighting_scheme=logit_normal", "--logit_std=0"], "--logit_std 0.0: must be above 0, up to 10"),
        (["--lora_dropout=1"], "--lora_dropout 1.0: must be 0 or more and below 1"),
        (["--adam_beta2=1"], "--adam_beta2 1.0: must be 0 or more and below 1"),
        (["--max_sequence_length=513"], "--max_sequence_length 513: must be from 1 to 512"),
        (["--seed=-1"], "--seed -1: must be from 0 to 4294967295"),
        (["--weighting_scheme=mode", "--mode_scale=2"], "--mode_scale 2.0: must be from -1 to 1.75"),
        (["--resolution=500"], "--resolution 500: must be a multiple of 16, up to 4096"),
        (["--resolution=0"], "--resolution 0: must be a multiple of 16, up to 4096"),
        (["--instance_prompt= "], "--instance_prompt is empty: give it a value or leave it out"),
        (["--validation_prompt="], "--validation_prompt is empty: give it a value or leave it out"),
        (
            ["--with_prior_preservation", "--class_data_dir=c"],
            "--with_prior_preservation needs --class_prompt: add it",
        ),
        (
            ["--class_prompt=a dog"],
            "--class_prompt a dog: needs --with_prior_preservation; add that or leave --class_prompt out",
        ),
        (
            ["--with_prior_preservation", "--class_data_dir=./pictures", "--class_prompt=a dog"],
            "--class_data_dir ./pictures: is the same folder as --instance_data_dir pictures, and each takes all"
            " pictures below it; choose folders apart",
        ),
        (
            ["--lr_scheduler=cosine", "--lr_warmup_steps=9", "--max_train_steps=8"],
            "--lr_warmup_steps 9: longer than the run of --max_train_steps 8; shorten the warm-up",
        ),
        (
            ["--device=CPU", "--mixed_precision=bf16"],
            "--mixed_precision bf16: the CPU backend has no bf16 kernels; use no or fp16 with --device CPU",
        ),
        (
            ["--device=CPU", "--no-deterministic"],
            "--no-deterministic: of use on Ascend only; leave it out with --device CPU",
        ),
        (
            ["--timestep_sampling=shift", "--weighting_scheme=logit_normal"],
            "--timestep_sampling shift: --weighting_scheme logit_normal draws the noise levels too;"
            " leave one of them out",
        ),
        (
            ["--timestep_sampling=flux_shift", "--flow_shift=2"],
            "--flow_shift 2: not used with --timestep_sampling flux_shift; leave it out",
        ),
        (
            ["--sigmoid_scale=2"],
            "--sigmoid_scale 2: not used with --timestep_sampling scheme; leave it out",
        ),
        (["--logit_mean=1"], "--logit_mean 1: not used with --weighting_scheme none; leave it out"),
        (["--logit_std=2"], "--logit_std 2: not used with --weighting_scheme none; leave it out"),
        (
            ["--weighting_scheme=logit_normal", "--mode_scale=1"],
            "--mode_scale 1: not used with --weighting_scheme logit_normal; leave it out",
        ),
        (["--lr_power=2"], "--lr_power 2: not used with --lr_scheduler constant; leave it out"),
        (
            ["--lr_scheduler=cosine", "--lr_num_cycles=3"],
            "--lr_num_cycles 3: not used with --lr_scheduler cosine; leave it out",
        ),
        (["--preserve_weight=2"], "--preserve_weight 2: needs --preserve_class; add that or leave it out"),
        (["--preserve_class= "], "--preserve_class is empty: give it a value or leave it out"),
        (
            ["--preserve_class=cat"],
            "--preserve_class cat: no word for the subject right before cat in --instance_prompt a photo of sks dog;"
            " give it as --trigger_word",
        ),
        (
            ["--preserve_class=sks dog", "--trigger_word=sks"],
            "--preserve_class sks dog: holds the trigger sks, so it names the subject; give the class alone",
        ),
        (
            ["--preserve_class=", "--caption_dropout=0.1"],
            '--caption_dropout 0.1: trains the empty prompt, which --preserve_class "" holds to the base model;'
            " leave one of them out",
        ),
        (
            ["--preserve_class=dog", "--with_prior_preservation", "--class_data_dir=c", "--class_prompt=a dog"],
            "--preserve_class dog: --with_prior_preservation keeps the class too, by pictures of it; leave one of them"
            " out",
        ),
        (["--ema_decay=1"], "--ema_decay 1.0: must be above 0 and below 1"),
        (["--ema_export"], "--ema_export: needs --ema_decay, which makes the average; add that or leave it out"),
        (["--huber_delta=0.5"], "--huber_delta 0.5: not used with --loss l2; leave it out"),
        (["--huber_schedule=constant"], "--huber_schedule constant: not used with --loss l2; leave it out"),
        (["--loss=huber", "--huber_delta=0"], "--huber_delta 0.0: must be above 0, up to 1000"),
        (
            ["--compile_cache=off", "--compile_cache_dir=graphs"],
            "--compile_cache_dir graphs: not used with --compile_cache off; leave one of them out",
        ),
        (["--caption_dropout=1.5"], "--caption_dropout 1.5: must be from 0 to 1"),
        (["--unmasked_weight=-0.1"], "--unmasked_weight -0.1: must be from 0 to 1"),
        (["--max_buckets=0"], "--max_buckets 0: must be from 1 to 64"),
        (
            ["--cache_crops=2", "--center_crop"],
            "--cache_crops 2: --center_crop has only one; leave one of them out",
        ),
        (
            ["--cache_crops=2", "--no-cache_latents"],
            "--cache_crops 2: --no-cache_latents crops anew for every example; leave one of them out",
        ),
        (
            ["--mask_dir=./pictures/masks"],
            "--mask_dir ./pictures/masks: lies in --instance_data_dir pictures, where every picture is used; choose a"
            " folder outside of it",
        ),
        (
            ["--aspect_ratio_buckets=5x7"],
            '--aspect_ratio_buckets: "5x7" is not height,width; write auto alone, or sizes such as "512,768;768,512"',
        ),
        (
            ["--aspect_ratio_buckets=512,500"],
            "--aspect_ratio_buckets: 512,500: both sides must be multiples of 16",
        ),
        (
            ["--aspect_ratio_buckets=672,1568"],
            "--aspect_ratio_buckets: 672,1568 has the area of about 1024 x 1024; give --resolution 1024 with it",
        ),
        (["--aspect_ratio_buckets=512,512; 512, 512"], "--aspect_ratio_buckets: 512,512 is given twice"),
        (
            ["--aspect_ratio_buckets=512,512;480,544", "--max_buckets=1"],
            "--aspect_ratio_buckets: 2 sizes, each a graph to compile; name fewer, or allow them by --max_buckets",
        ),
        (["--allow_changed=rank,sed"], "--allow_changed sed: no such setting; did you mean seed?"),
    ],
)
def test_values_that_cannot_be_meant(flags, problem):
    assert problems_with(*flags) == [problem]


@pytest.mark.parametrize(
    "flags",
    [
        ["--lr_scheduler=constant_with_warmup", "--lr_warmup_steps=8", "--max_train_steps=8"],
        ["--mixed_precision=bf16", "--no-deterministic", "--device=Ascend"],
        ["--mixed_precision=fp16", "--device=CPU", "--dataloader_num_workers=0"],
        ["--aspect_ratio_buckets=512,512;480,544;", "--max_buckets=2", "--caption_dropout=1", "--unmasked_weight=0"],
        ["--weighting_scheme=mode", "--mode_scale=-1", "--lora_dropout=0", "--adam_beta1=0", "--resolution=16"],
        ["--lr_scheduler=polynomial", "--lr_power=2", "--max_sequence_length=1"],
    ],
)
def test_values_at_the_edge_are_fine(flags):
    assert check_values(parse(*flags)) == []


def test_every_number_with_a_limit_is_a_flag_and_every_whole_number_has_a_limit():
    limited = [name for _, _, names in BOUNDS for name in names.split()]
    assert len(limited) == len(set(limited)) and set(limited) <= set(FLAGS)
    whole = {name for name, flag in read_flags().items() if flag.annotation in (int, int | None)}
    assert whole <= set(limited)


def test_derived_values():
    config = parse("--rank=8", "--train_batch_size=2", "--gradient_accumulation_steps=3", "--allow_changed=rank, seed")
    assert config.lora.alpha == 8.0 and config.lora.lora_alpha is None
    assert parse("--rank=8", "--lora_alpha=4").lora.alpha == 4.0
    assert global_batch(config, world_size=4) == 24
    assert cache_path(config) == Path("flux-dreambooth-lora/cache")
    assert cache_path(parse("--encode_cache_dir=there")) == Path("there")
    assert config.output.changes_allowed == {"rank", "seed"}


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model folder with all its parts, its T5 in two shards."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, "tiny")
    split_weights(folder / "text_encoder_2" / "model.safetensors", "1.safetensors", "2.safetensors")
    return folder


@pytest.fixture
def folders(tmp_path, monkeypatch, tiny):
    """The model folder, and a folder for pictures."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    return tmp_path


def file_problems(*flags: str) -> list[str]:
    return every_flag_is_listed(check_files(parse("--pretrained_model_name_or_path", "model", *flags)))


def test_a_whole_model_folder_passes_and_nothing_is_written(folders):
    before = sorted(folders.rglob("*"))
    assert file_problems("--output_dir", "new/run", "--resume_from_checkpoint", "latest") == []
    assert sorted(folders.rglob("*")) == before


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("model_index.json", "model_index.json is missing; a FLUX.1 folder in diffusers layout has it"),
        ("scheduler", "scheduler is missing; the download may be incomplete"),
        (
            "scheduler/scheduler_config.json",
            "scheduler/scheduler_config.json is missing; the download may be incomplete",
        ),
        ("vae/config.json", "vae/config.json is missing; the download may be incomplete"),
        (
            "tokenizer/vocab.json",
            "tokenizer has no vocabulary (vocab.json and merges.txt); the download may be incomplete",
        ),
        ("tokenizer_2", "tokenizer_2 is missing; the download may be incomplete"),
        (
            "transformer/diffusion_pytorch_model.safetensors",
            "transformer has no weights (diffusion_pytorch_model.safetensors or"
            " diffusion_pytorch_model.safetensors.index.json); the download may be incomplete",
        ),
        ("text_encoder_2/2.safetensors", "text_encoder_2/2.safetensors is missing; the download may be incomplete"),
    ],
)
def test_a_part_of_the_model_that_is_missing_is_named(folders, part, problem):
    path = folders / "model" / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert file_problems() == [f"--pretrained_model_name_or_path model: {problem}"]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        (
            "model_index.json",
            '{"_class_name": "StableDiffusionPipeline"}',
            "names a StableDiffusionPipeline, not a Flux",
        ),
        ("vae/config.json", "{", "vae/config.json cannot be read"),
        ("vae/config.json", "[]", "vae/config.json holds no JSON object"),
        ("text_encoder_2/model.safetensors.index.json", "{}", "names no weight files"),
        ("text_encoder_2/1.safetensors", "", "text_encoder_2/1.safetensors is empty"),
        ("vae/diffusion_pytorch_model.safetensors", "version https://git-lfs.github.com/spec/v1", "pointer of Git LFS"),
    ],
)
def test_a_damaged_file_of_the_model_is_named(folders, file, content, problem):
    (folders / "model" / file).write_text(content, encoding="utf-8")
    (found,) = file_problems()
    assert problem in found


def test_a_variant_is_looked_for_and_plain_weights_do_as_well(folders):
    vae = folders / "model" / "vae"
    (vae / "diffusion_pytorch_model.safetensors").rename(vae / "diffusion_pytorch_model.fp16.safetensors")
    assert file_problems("--variant", "fp16") == []
    assert len(file_problems()) == 1


def test_the_resolution_is_held_against_the_models_own_vae(folders):
    vae = vae_config("tiny") | {"block_out_channels": [8, 8, 16, 16, 16]}
    vae |= {"down_block_types": ["DownEncoderBlock2D"] * 5, "up_block_types": ["UpDecoderBlock2D"] * 5}
    (folders / "model/vae/config.json").write_text(json.dumps(vae), encoding="utf-8")
    weights = draw_all("vae", vae, seed=0)
    (folders / "model/vae/diffusion_pytorch_model.safetensors").write_bytes(weights)
    assert file_problems("--resolution", "64") == []
    assert file_problems("--resolution", "48") == [
        "--pretrained_model_name_or_path model: its VAE needs a multiple of 32, not --resolution 48"
    ]
    assert file_problems("--resolution", "64", "--aspect_ratio_buckets", "32,128;64,64") == []
    for sizes in ("auto", "64,48"):
        assert file_problems("--resolution", "64", "--aspect_ratio_buckets", sizes) == [
            "--pretrained_model_name_or_path model: its VAE needs multiples of 32; name such sizes with"
            " --aspect_ratio_buckets"
        ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("black-forest-labs/FLUX.1-dev", None),
        ("model/vae/config.json", "is a file; give the folder"),
        ("model/other", "no such folder; check the path"),
        ("./other", "no such folder; check the path"),
        ("/nowhere/at/all", "no such folder; check the path"),
        ("outputs/demo/model", "neither a folder nor a name on the hub of the form owner/model"),
        ("FLUX.1-dev", "neither a folder nor a name on the hub of the form owner/model"),
    ],
)
def test_a_model_is_a_folder_or_a_name_on_the_hub(folders, name, problem):
    expected = [f"--pretrained_model_name_or_path {name}: {problem}"] if problem else []
    assert check_files(parse("--pretrained_model_name_or_path", name)) == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--instance_data_dir=none"], "--instance_data_dir none: no such folder; check the path"),
        (["--instance_data_dir=file"], "--instance_data_dir file: is a file; give the folder"),
        (["--output_dir=file"], "--output_dir file: {here}/file is a file; choose another folder"),
        (["--output_dir=file/run"], "--output_dir file/run: {here}/file is a file; choose another folder"),
        (["--encode_cache_dir=file"], "--encode_cache_dir file: {here}/file is a file; choose another folder"),
        (
            ["--with_prior_preservation", "--class_prompt=a dog", "--class_data_dir=file"],
            "--class_data_dir file: {here}/file is a file; choose another folder",
        ),
        (
            ["--resume_from_checkpoint=checkpoint-9"],
            "--resume_from_checkpoint checkpoint-9: no such folder; give the path of a checkpoint folder, or latest",
        ),
        (
            ["--resume_from_checkpoint=checkpoint-3", "--output_dir=run"],
            "--resume_from_checkpoint checkpoint-3: no such folder; did you mean run/checkpoint-3?",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(folders, flags, problem):
    (folders / "file").write_text("", encoding="utf-8")
    (folders / "run" / "checkpoint-3").mkdir(parents=True)
    assert file_problems(*flags) == [problem.format(here=folders)]


def test_class_pictures_may_be_yet_to_come(folders):
    assert file_problems("--with_prior_preservation", "--class_prompt=a dog", "--class_data_dir=new/class") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write anywhere")
def test_folders_without_permission(folders):
    (folders / "read_only").mkdir(mode=0o500)
    (folders / "closed").mkdir(mode=0o000)
    assert file_problems("--output_dir=read_only/run", "--instance_data_dir=closed") == [
        "--instance_data_dir closed: no permission to read this folder",
        f"--output_dir read_only/run: no permission to write in {folders}/read_only; choose another folder",
    ]


def test_yaml_of_the_resolved_config_is_plain_yaml():
    assert yaml.safe_load(to_yaml(parse())) == to_flat_dict(parse())
