"""What the settings of the pictures, their prompts and their class may contradict."""

import dataclasses

from flux_db.check.rule import Rule, broken
from flux_db.data import buckets
from flux_db.problem import Problem
from flux_db.settings.concepts import CLASS_PROMPT, has_trigger
from flux_db.settings.derived import background, triggers
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config, DataConfig


def picture_problems(config: Config) -> list[Problem]:
    return [
        *_prior_problems(config),
        *_preserve_problems(config),
        *_source_problems(config),
        *_crop_problems(config),
    ]


def _prior_problems(config: Config) -> list[Problem]:
    data, switch = config.data, "with_prior_preservation"
    given = {name: getattr(data, name) for name in ("class_data_dir", "class_prompt")}
    return broken(
        Rule(
            data.with_prior_preservation and data.class_prompt is None,
            switch,
            " needs --class_prompt: add it",
            ("class_prompt",),
        ),
        *(
            Rule(
                not data.with_prior_preservation and value is not None,
                name,
                f" {value}: needs --{switch}; add that or leave --{name} out",
                (switch,),
            )
            for name, value in given.items()
        ),
    )


def _preserve_problems(config: Config) -> list[Problem]:
    """Of the weight; check/concepts.py has those of the class."""
    weight = config.data.preserve_weight
    return broken(
        Rule(
            weight != DataConfig.preserve_weight and not is_preserved(config),
            "preserve_weight",
            f" {weight:g}: needs --preserve_class; add that or leave it out",
            ("preserve_class", "concepts"),
        )
    )


def _source_problems(config: Config) -> list[Problem]:
    data = config.data
    defaults = {field.name: field.default for field in dataclasses.fields(data)}
    sources = {"instance_data_dir": data.instance_data_dir, "dataset_name": data.dataset_name}
    of_datasets = {name: getattr(data, name) for name in ("dataset_config_name", "image_column", "caption_column")}
    return broken(
        Rule(
            data.instance_data_dir is None and data.dataset_name is None and not data.concepts,
            "instance_data_dir",
            " or --dataset_name is required: say where the pictures of the subject are",
            ("dataset_name", "concepts"),
        ),
        *(
            Rule(
                bool(data.concepts) and value is not None,
                name,
                f" {value}: not together with --concepts, whose entries have a dir; leave one out",
                ("concepts",),
            )
            for name, value in sources.items()
        ),
        Rule(
            data.instance_data_dir is not None and data.dataset_name is not None,
            "dataset_name",
            f" {data.dataset_name}: not together with --instance_data_dir; leave one out",
            ("instance_data_dir",),
        ),
        *(
            Rule(
                data.dataset_name is None and value != defaults[name],
                name,
                f" {value}: needs --dataset_name; add that or leave --{name} out",
                ("dataset_name",),
            )
            for name, value in of_datasets.items()
        ),
        *_trigger_rules(config),
        Rule(
            not _has_background(config),
            "alpha_background",
            f" {data.alpha_background}: no colour; give a name such as grey, or #rrggbb",
        ),
    )


def _trigger_rules(config: Config) -> list[Rule]:
    data, word = config.data, config.data.trigger_word
    prompts = [("instance_prompt", data.instance_prompt)] if data.instance_prompt is not None else []
    prompts += [("validation_prompt", text) for text in config.validation.validation_prompt]
    needed = "a trigger in --concepts" if data.concepts else "--trigger_word"
    return [
        *(
            Rule(
                not triggers(config) and has_trigger(text),
                name,
                f" {text}: needs {needed}, which takes the place of {{trigger}}",
                ("trigger_word", "concepts"),
            )
            for name, text in prompts
        ),
        *(
            Rule(
                data.class_prompt is None and CLASS_PROMPT in text,
                "validation_prompt",
                f" {text}: needs --class_prompt, which takes the place of {CLASS_PROMPT}",
                ("class_prompt",),
            )
            for text in config.validation.validation_prompt
        ),
        Rule(word is not None and has_trigger(word), "trigger_word", f" {word}: must be a word of its own"),
        Rule(
            data.class_prompt is not None and has_trigger(data.class_prompt),
            "class_prompt",
            f" {data.class_prompt}: names the class, so without {{trigger}}",
        ),
    ]


def _has_background(config: Config) -> bool:
    try:
        background(config)
    except ValueError:
        return False
    return True


def _crop_problems(config: Config) -> list[Problem]:
    data, found = config.data, []
    if data.aspect_ratio_buckets is not None:
        wrong = buckets.problems(data.aspect_ratio_buckets, data.resolution, data.max_buckets)
        sizes = ("resolution", "max_buckets")
        found = [Rule(True, "aspect_ratio_buckets", f": {text}", sizes).problem for text in wrong]
    several = data.cache_crops > 1
    return found + broken(
        Rule(
            several and data.center_crop,
            "cache_crops",
            f" {data.cache_crops}: --center_crop has only one; leave one of them out",
            ("center_crop",),
        ),
        Rule(
            several and not data.cache_latents,
            "cache_crops",
            f" {data.cache_crops}: --no-cache_latents crops anew for every example; leave one of them out",
            ("cache_latents",),
        ),
    )
