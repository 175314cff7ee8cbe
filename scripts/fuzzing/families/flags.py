"""The words of the command line: numbers, texts, unknown flags, contradictions; of every command."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fuzzing import hostile
from fuzzing.case import Bench, Case, Expect, Plan, either, fine, plan, refused
from fuzzing.looks import can_start

WHOLE = (
    "rank", "repeats", "num_class_images", "sample_batch_size", "train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_train_steps", "lr_num_cycles", "num_validation_images", "validation_epochs",
    "validation_steps", "validation_inference_steps", "checkpointing_steps", "checkpoints_total_limit",
    "max_skipped_steps", "max_buckets", "cache_crops", "resolution", "max_sequence_length", "seed", "validation_seed",
    "dataloader_num_workers", "lr_warmup_steps",
)  # fmt: skip
REAL = (
    "prior_loss_weight", "guidance_scale", "validation_guidance", "adam_weight_decay", "lora_alpha", "logit_std",
    "logit_mean", "learning_rate", "lr_power", "adam_epsilon", "max_grad_norm", "lora_dropout", "adam_beta1",
    "adam_beta2", "validation_share", "caption_dropout", "unmasked_weight", "mode_scale",
)  # fmt: skip

# Of these so many cannot be: memory or time would end before the run began.
TOO_MANY = (
    "rank", "repeats", "train_batch_size", "max_train_steps", "num_train_epochs", "cache_crops", "resolution",
    "max_sequence_length", "seed",
)  # fmt: skip
# Of these no run becomes better, and float32 has no such number.
TOO_LARGE = ("learning_rate", "lora_alpha", "guidance_scale", "adam_weight_decay")

NOT_WHOLE = ("", " ", "x", "1.5", "nan", "inf", "-inf", "0x10", "1e3", "9" * 5000, "--", "٣x", "1 2")
NOT_REAL = ("", "x", "nan", "inf", "-inf", "1e400", "-1e400", "0x1p3", "1,5", "9" * 5000)
BYTES = os.fsdecode(b"a photo of \xff\xfe")

# Train as well as check: what is refused is refused by all that take these flags.
TRAINERS = ("check", "check", "check", "train", "prepare", "encode", "class-images", "launch")


def plans() -> Iterator[Plan]:
    yield plan("a run that could start", lambda bench: bench.check(fine(can_start)))
    yield plan("the same, as --dry_run", dry_run)
    yield from _numbers()
    yield from _texts()
    yield from _unknown()
    yield from _contradictions()
    yield from _commands()


def dry_run(bench: Bench) -> Case:
    return bench.run(fine(can_start), "train", *bench.flags(dry_run=True), writes=["out"])


def with_flag(bench: Bench, expect: Expect, changes: dict[str, object]) -> Case:
    """A refusal may come from any command that takes the flags; a success is shown by check."""
    command = bench.rng.choice(TRAINERS) if expect.codes == (2,) else "check"
    words = ["--cards", "1", "--"] if command == "launch" else []
    return bench.run(expect, command, *words, *bench.flags(**changes), writes=["out"])


def one(flag: str, value: object, expect: Expect, **others: object) -> Plan:
    about = f"--{flag} {str(value)[:60]}"
    return plan(about, with_flag, expect, {**others, flag: value})


def _numbers() -> Iterator[Plan]:
    for number, flag in enumerate(WHOLE):
        for value in NOT_WHOLE[number % 3 :: 3]:
            yield one(flag, value, refused(f"--{flag}"))
        yield one(flag, -(10**number), refused(f"--{flag}"))
        yield one(flag, 10**18, refused(f"--{flag}") if flag in TOO_MANY else either(f"--{flag}"))
    for number, flag in enumerate(REAL):
        for value in NOT_REAL[number % 3 :: 3]:
            yield one(flag, value, refused(f"--{flag}"))
        yield one(flag, "1e300", refused(f"--{flag}") if flag in TOO_LARGE else either(f"--{flag}"))
    for flag, value in (("repeats", 10**9), ("resolution", 102400), ("resolution", 33), ("resolution", 0)):
        yield one(flag, value, refused(f"--{flag}"))
    for value in ("\uff14", "1_0", " 4 ", "+4", "007"):  # Python takes these for numbers
        yield one("rank", value, either("--rank"))


def _texts() -> Iterator[Plan]:
    paths = ("pretrained_model_name_or_path", "instance_data_dir", "validation_data_dir", "mask_dir")
    files = ("config", "validation_prompts_file", "resume_from_checkpoint")
    for flag in (*paths, *files):
        for value in ("", "no/such/place", "\x1b[31mred", "x" * 300, "y/" * 3000, os.fsdecode(b"\xff\xfe")):
            yield one(flag, value, refused(f"--{flag}"))
    for flag in ("instance_prompt", "trigger_word", "validation_prompt"):
        for value in ("", "  ", BYTES):
            yield one(flag, value, refused(f"--{flag}"))
        for value in (hostile.TERMINAL, "a\u202eb", "🐕" * 50, "x" * 5000):
            yield one(flag, value, either(f"--{flag}"))
    layers = ("", ",,,", " , ", "nope", "attn.to_q,nope", ".*", "attn.to_q\x1b[31m", BYTES, "attn.to_q " * 50)
    for value in layers:
        yield one("lora_layers", value, refused("--lora_layers"))
    for value in (
        "x",
        "32,32;32,32",
        "0,0",
        "16",
        "9" * 5000 + ",32",
        "-32,32",
        "32,32,32",
        ";;",
        "64,64",
        "auto;auto",
    ):
        yield one("aspect_ratio_buckets", value, refused("--aspect_ratio_buckets"))
    for value in ("x", "0x0", "32", "32x", "-32x32", "9" * 5000 + "x32", "33x33", "32x32x32"):
        yield one("validation_size", value, refused("--validation_size"))
    for value in ("", "no colour", "#12", "rgb(1,2)", "rgba(1,2,3,4)", "white" * 1000, "\x1b[31m"):
        yield one("alpha_background", value, refused("--alpha_background"))
    for flag, value in (("report_to", "nowhere"), ("report_to", "none,tensorboard"), ("allow_changed", "nothing")):
        yield one(flag, value, refused(f"--{flag}"))
    for flag in ("optimizer", "lr_scheduler", "weighting_scheme", "device", "mixed_precision", "jit_level"):
        yield one(flag, "other\x1b[0m", refused(f"--{flag}"))
    for flag, value in (("lora_layers", "attn.to_q"), ("validation_size", "32x48"), ("alpha_background", "#123456")):
        yield one(flag, value, fine(can_start))


def words_after(bench: Bench, expect: Expect, words: list[str]) -> Case:
    return bench.run(expect, "check", *bench.flags(), *words, writes=["out"])


def _unknown() -> Iterator[Plan]:
    for words in (
        ["--nothing"], ["--nothing", "1"], ["--nothing=1"], ["--resol", "32"], ["--no-rank"], ["--cache_latents=true"],
        ["--cache_latents", "true"], ["--rank"], ["--rank", "--seed", "1"], ["stray"], ["-x"], ["--", "stray"],
        ["--hub_token"], ["--hub_token", ""], ["--use_8bit_adam"], ["--\x1b[31m"], [os.fsdecode(b"--\xff")],
        ["--prompt\n--rank"], ["stray"] * 5000, ["--" + "x" * 100_000], ["--config"], ["---"], ["--=", "1"],
    ):  # fmt: skip
        names = [words[0].split("=")[0], "belong to no flag"]
        escaped = words[0].encode("unicode_escape", "surrogatepass").decode()[:20]
        yield plan(" ".join(words)[:60], words_after, refused(*names, escaped, "error: "), words)
    for words in (["--rank", "8"], ["--rank=8"], ["--lora_rank", "8"], ["--no-cache_latents", "--cache_latents"]):
        yield plan(f"{' '.join(words)}, given twice", words_after, fine(can_start), words)


def _contradictions() -> Iterator[Plan]:
    for about, names, changes in (
        ("no pictures", ["--instance_data_dir"], {"instance_data_dir": None}),
        ("no prompt", ["--instance_prompt"], {"instance_prompt": None}),
        ("no model", ["--pretrained_model_name_or_path"], {"pretrained_model_name_or_path": None}),
        ("two sources", ["--dataset_name"], {"dataset_name": "some/where"}),
        ("class without prior", ["--class_prompt"], {"class_prompt": "a dog"}),
        ("prior without class", ["--class_prompt"], {"with_prior_preservation": True}),
        ("warm-up of a constant", ["--lr_warmup_steps"], {"lr_warmup_steps": 2}),
        ("warm-up too long", ["--lr_warmup_steps"], {"lr_warmup_steps": 5, "lr_scheduler": "linear"}),
        ("best of nothing", ["--keep_best"], {"keep_best": True}),
        ("bf16 on the CPU", ["--mixed_precision"], {"mixed_precision": "bf16"}),
        ("speed of Ascend on the CPU", ["--no-deterministic"], {"no-deterministic": True}),
        ("trigger without word", ["--trigger_word"], {"instance_prompt": "a {trigger}"}),
        ("trigger in the word", ["--trigger_word"], {"trigger_word": "{trigger}"}),
        ("share and folder", ["--validation_share"], {"validation_share": 0.5, "validation_data_dir": "/tmp"}),
        ("share of all", ["--validation_share"], {"validation_share": 0.999999}),
        ("crops of the middle", ["--cache_crops"], {"cache_crops": 3, "center_crop": True}),
        ("hub name without push", ["--hub_model_id"], {"hub_model_id": "a/b"}),
        ("column without dataset", ["--image_column"], {"image_column": "x"}),
        ("masks of no alpha", ["--alpha_mask"], {"alpha_mask": True}),
    ):
        yield plan(about, with_pictures, refused(*names), changes)


def with_pictures(bench: Bench, expect: Expect, changes: dict[str, object]) -> Case:
    """A refusal by those commands that look at the pictures."""
    command = bench.rng.choice(("check", "check", "train", "prepare"))
    return bench.run(expect, command, *bench.flags(**changes), writes=["out"])


def command(bench: Bench, expect: Expect, words: list[str]) -> Case:
    """{model}, {pictures}: the shared ones."""
    told = {"model": bench.world.model, "pictures": bench.world.pictures}
    return bench.run(expect, *(word.format(**told) if "{" in word else word for word in words), writes=["made"])


def _commands() -> Iterator[Plan]:
    for word in ("check", "generate", "info", "export", "fuse", "report", "push", "launch", "tiny-model", "train"):
        yield plan(f"{word} --help", command, fine(), [word, "--help"])
        yield plan(f"{word} --nothing", command, refused("--nothing", "required"), [word, "--nothing"])
        yield plan(f"{word} alone", command, refused("required", "error"), [word])
    for words in (["chek"], [""], ["\x1b[31m"], ["--version"], [os.fsdecode(b"\xff")]):
        yield plan(f"command {words[0]!r}", command, refused("error"), words)
    generate = ["generate", "--model", "{model}", "-o", "made", "--prompt", "a dog"]
    for flag, value in (
        ("--size", "x"), ("--size", "0x0"), ("--size", "9" * 5000 + "x16"), ("--size", "102400x102400"),
        ("--num", "0"), ("--num", "1000000000"), ("--num", "9" * 5000), ("--num", "²"),
        ("--steps", "0"), ("--steps", "-1"), ("--steps", "9" * 5000), ("--guidance", "nan"), ("--guidance", "inf"),
        ("--guidance", "x"), ("--seed", "-1"), ("--seed", "4294967296"), ("--seed", "9" * 5000),
        ("--max_sequence_length", "513"), ("--max_sequence_length", "0"), ("--lora", "no.safetensors"),
        ("--lora", "{model}:nan"), ("--lora", "{model}:1e400"), ("--lora", ":"), ("--lora", "a:b:c"), ("--prompt", ""),
        ("--prompt", BYTES), ("--prompts_file", "no.txt"), ("--model", "nowhere"), ("--model", "/etc/passwd"),
        ("--device", "TPU"), ("-o", "/etc/passwd"), ("-o", "/proc/made"), ("--lora", "x" * 300),
    ):  # fmt: skip
        names = [flag, "-o/--output"] if flag == "-o" else [flag]
        yield plan(f"generate {flag} {value[:30]}", command, refused(*names), [*generate, flag, value])
    for words in (
        ["launch", "--cards", "0", "--"], ["launch", "--cards", "x", "--"], ["launch", "--cards", "9" * 5000, "--"],
        ["launch", "--cards", "2", "--nodes", "0", "--"], ["launch", "--cards", "1", "--node_rank", "5", "--"],
        ["launch", "--cards", "2", "--port", "99999999", "--"], ["launch", "--cards", "2", "--port", "-1", "--"],
        ["launch", "--cards", "1000000000", "--"],
    ):  # fmt: skip
        yield plan(" ".join(words)[:40], launch, refused("--", "DEVICES", "NODE", "PORT"), words)
    for words in (
        ["tiny-model", "/etc/passwd"], ["tiny-model", "/proc/x"],
        ["tiny-model", "made", "--size", "huge"], ["demo-pictures", "made", "--count", "-1"],
        ["demo-pictures", "made", "--size", "0"], ["demo-pictures", "made", "--size", "-5"],
        ["demo-pictures", "made", "--count", "1000000000"],
        ["demo-pictures", "/etc/passwd"], ["demo-pictures", "made", "--count", "0"],
    ):  # fmt: skip
        yield plan(" ".join(words), command, refused("--size", "--count", "passwd", "/proc/x"), words)
    words = ["demo-pictures", "made", "--size", "1000000"]
    yield plan(" ".join(words), command, Expect(codes=(1, 2)), words)
    for words in (["tiny-model", "made"], ["demo-pictures", "made", "--count", "1", "--size", "16"]):
        yield plan(" ".join(words), command, fine(), words)


def launch(bench: Bench, expect: Expect, words: list[str]) -> Case:
    return bench.run(expect, *words, *bench.flags())
