"""What the settings of samples, validation loss and scores may contradict."""

from flux_db.check.rule import Rule, broken
from flux_db.problem import Problem
from flux_db.settings.concepts import concepts_of, setting_name
from flux_db.settings.schema import Config
from flux_db.settings.subject_word import word_of
from flux_db.size import LARGEST_SIDE, PIXELS_PER_TOKEN, parse_size


def validation_problems(config: Config) -> list[Problem]:
    validation, size = config.validation, config.validation.validation_size
    sides = parse_size(size) if size is not None else None
    return broken(
        Rule(
            size is not None and sides is None,
            "validation_size",
            f" {size}: expects height x width in pixels, such as 768x512",
        ),
        Rule(
            sides is not None and any(not 0 < side <= LARGEST_SIDE or side % PIXELS_PER_TOKEN for side in sides),
            "validation_size",
            f" {size}: both sides must be multiples of {PIXELS_PER_TOKEN}, up to {LARGEST_SIDE}",
        ),
        Rule(
            validation.validation_data_dir is not None and validation.validation_share > 0,
            "validation_share",
            ": not together with --validation_data_dir; give one of them",
            ("validation_data_dir",),
        ),
        Rule(
            validation.keep_best == "loss" and not validation.has_held_out,
            "keep_best",
            ": needs --validation_data_dir or --validation_share to measure what is best",
            ("validation_data_dir", "validation_share"),
        ),
        Rule(
            validation.early_stop_patience is not None and validation.keep_best == "none",
            "early_stop_patience",
            f" {validation.early_stop_patience}: needs --keep_best loss or --keep_best score, which says what is"
            " watched and keeps the best LoRA",
            ("keep_best",),
        ),
        *_score_rules(config),
    )


def _score_rules(config: Config) -> list[Rule]:
    validation, steps = config.validation, config.validation.score_steps
    networks = {name: getattr(validation, name) for name in ("score_dino", "score_clip")}
    prompts = ("validation_prompt", "validation_prompts_file")
    subject = concepts_of(config)[0]
    trigger = "its key trigger" if config.data.concepts else "--trigger_word"
    return [
        Rule(
            validation.keep_best == "score" and steps is None,
            "keep_best",
            " score: needs --score_steps, which measures what is best",
            ("score_steps",),
        ),
        Rule(
            steps is not None and not any(getattr(validation, name) for name in prompts),
            "score_steps",
            f" {steps}: needs --validation_prompt or --validation_prompts_file, whose samples are scored",
            prompts,
        ),
        *(
            Rule(
                value is not None and steps is None,
                name,
                f" {value}: needs --score_steps; add that or leave --{name} out",
                ("score_steps",),
            )
            for name, value in networks.items()
        ),
        Rule(
            steps is not None and any(networks.values()) and word_of(config) is None,
            "score_steps",
            f' {steps}: {setting_name(config, subject, "prompt")} "{subject.prompt}" has no rare word, such as sks,'
            f" that distinguishes samples of the subject from others; name it with {trigger}",
            ("instance_prompt", "trigger_word", "class_prompt", "concepts"),
        ),
    ]
