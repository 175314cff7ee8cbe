"""The model card: README.md beside the LoRA file, with the header that the Hugging Face hub reads. No local paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flux_db import __version__
from flux_db.atomic import write_file
from flux_db.console import counted, printable, say
from flux_db.errors import describe
from flux_db.files import TEXT_LIMIT, read_bytes
from flux_db.lora import trained_file
from flux_db.model.identity import base_model_name, is_hub_name, licence
from flux_db.output_folder import EMA_LORA, LORA_FILE, MODEL_CARD
from flux_db.report import usage
from flux_db.run import sample_files
from flux_db.settings import lora_layers
from flux_db.settings.concepts import Concept, concepts_of
from flux_db.settings.derived import instance_prompt, text_lora, triggers, validation_size
from flux_db.settings.schema import Config, to_flat_dict

# By it a card is known as this program's own, which a later run may replace.
MARK = "<!-- written by flux-db; remove this line to keep your own version -->"

# Of a setting that may name hundreds.
MOST_PATTERNS = 10

TAGS = ["text-to-image", "diffusers", "lora", "flux", "dreambooth", "mindspore", "template:sd-lora"]


def write_card(config: Config, facts: trained_file.Facts) -> None:
    """Write the card; one that was written by somebody else stays."""
    path = Path(config.output.output_dir, MODEL_CARD)
    if not _is_ours(path):
        say(f"{path} was not written by this program and stays as it is")
        return
    try:
        write_file(path, card(config, facts).encode())
    except OSError as problem:  # the LoRA is safe, and the upload need not fail for this
        say(f"warning: the model card was not written: {describe(problem)}; the LoRA file is complete")


def _is_ours(path: Path) -> bool:
    """Whether the card may be replaced; what cannot be read was written by somebody else."""
    try:
        return MARK.encode() in read_bytes(path, TEXT_LIMIT)
    except FileNotFoundError:
        return not path.is_symlink()
    except OSError:
        return False


def card(config: Config, facts: trained_file.Facts) -> str:
    from huggingface_hub import ModelCardData

    samples = last_samples(config)
    parts = [
        f"---\n{ModelCardData(**header(config, samples)).to_yaml()}\n---\n{MARK}",
        f"# FLUX.1 LoRA: `{_plain(_name(config))}`",
        _introduction(config, facts),
        _pictures(config, samples),
        _usage(config),
        _settings(config, facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _name(config: Config) -> str:
    """What the LoRA is called by: the triggers, or else the prompts."""
    prompts = dict.fromkeys(concept.prompt for concept in concepts_of(config))
    return ", ".join(triggers(config)) or "; ".join(prompts)


def header(config: Config, samples: list[tuple[str, str]]) -> dict[str, Any]:
    """What the hub reads from the card."""
    model = config.model.pretrained_model_name_or_path
    name = base_model_name(model)
    known = {"base_model": name, "base_model_relation": "adapter"} if is_hub_name(name) else {}
    terms = {field: value for field, value in licence(model)._asdict().items() if value}
    fields: dict[str, Any] = {
        **known,
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        **terms,
        "instance_prompt": _on_one_line(_name(config)),
        "tags": TAGS,
    }
    if samples:
        fields["widget"] = [{"text": _on_one_line(text), "output": {"url": url}} for url, text in samples]
    return fields


def last_samples(config: Config) -> list[tuple[str, str]]:
    """(path inside the output folder, prompt) of the last round of sample pictures."""
    output = Path(config.output.output_dir)
    rounds = sample_files.read_rounds(output)
    pictures = rounds[-1].pictures if rounds else ()
    return [(p.path.relative_to(output).as_posix(), p.prompt or instance_prompt(config)) for p in pictures]


def _introduction(config: Config, facts: trained_file.Facts) -> str:
    name = base_model_name(config.model.pretrained_model_name_or_path)
    base = f"[{name}](https://huggingface.co/{name})" if is_hub_name(name) else f"the FLUX.1 model `{_plain(name)}`"
    trained = f"{counted(facts.steps, 'step')} on {counted(facts.pictures, 'picture')}"
    start = f"A DreamBooth LoRA for {base}, trained with MindSpore: {trained}."
    first, *others = concepts_of(config)
    if others:
        lines = "\n".join(f"- {_about(concept)}" for concept in (first, *others))
        return f"{start}\n\nIt was trained on {len(others) + 1} concepts; use their words in your prompts:\n\n{lines}"
    call = f"Its trigger is `{_plain(first.trigger)}`. It" if first.trigger else "It"
    return f"{start}\n\n{call} was trained with the prompt `{_plain(first.prompt)}`: use its words in yours."


def _about(concept: Concept) -> str:
    trigger = f", trigger `{_plain(concept.trigger)}`" if concept.trigger else ""
    return f"`{_plain(concept.prompt)}`{trigger}"


def _pictures(config: Config, samples: list[tuple[str, str]]) -> str:
    if not samples:
        return ""
    lines = ["## Samples", ""]
    if Path(config.output.output_dir, "samples/grid.png").exists():
        lines += ["![All samples, from the first step (top) to the last](samples/grid.png)", ""]
    lines += [f"- `{_plain(text)}`" for text in dict.fromkeys(text for _, text in samples)]
    return "\n".join(lines)


def _usage(config: Config) -> str:
    name = base_model_name(config.model.pretrained_model_name_or_path)
    base = name if is_hub_name(name) else "path/to/the/base/model"
    here, prompt, settings = "path/to/this/folder", instance_prompt(config), to_flat_dict(config)
    lora = config.hub.hub_model_id or here
    return f"""## Use it

With flux-db, which takes what is not given from the run that trained the LoRA:

```bash
{usage.command(here, prompt, "pictures", None if is_hub_name(name) else base)}
```

In mindone:

```python
{usage.mindone(settings, base, lora, prompt)}
```

In diffusers:

```python
{usage.diffusers(settings, base, lora, prompt)}
```

In ComfyUI: put `{LORA_FILE}` into `models/loras` and choose it in the node "Load LoRA"."""


def _settings(config: Config, facts: trained_file.Facts) -> str:
    optim, data, lora = config.optim, config.data, config.lora
    rows = {
        "Rank, alpha": f"{lora.rank}, {lora.alpha:g}{_listed('other ranks', lora.lora_rank_pattern)}",
        "Layers": _layers(config),
        **_text_encoder(config),
        **({"Started from": f"`{_plain(facts.init_lora)}`"} if facts.init_lora else {}),
        "Steps": facts.steps,
        "Pictures": facts.pictures,
        "Pictures per step": facts.global_batch,
        "Resolution": ", ".join(map(str, sorted({side for c in concepts_of(config) for side in c.resolutions}))),
        **_concepts(config),
        "Optimizer": f"{optim.optimizer}, learning rate {optim.learning_rate:g}, {optim.lr_scheduler}{_rates(config)}",
        **_average(config),
        "Prior preservation": f"yes, `{_plain(data.class_prompt or '')}`" if data.with_prior_preservation else "no",
        **_preserved(config),
        "Loss": _loss(config),
        "Precision": config.runtime.mixed_precision,
        "Seed": config.output.seed,
        "Samples": _samples(config),
        "Made with": f"flux-db {__version__}; settings `{trained_file.settings_hash(config, facts.global_batch)}`",
    }
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["## Settings", "", "| Setting | Value |", "|---|---|", *lines])


def _samples(config: Config) -> str:
    validation = config.validation
    how = f"{validation.validation_inference_steps} steps, guidance {validation.validation_guidance:g}"
    return f"{validation_size(config)} px, {config.data.max_sequence_length} tokens, {how}"


def _layers(config: Config) -> str:
    """Names and blocks of --lora_layers."""
    blocks = map(str, lora_layers.parse(config.lora.lora_layers).blocks)
    return ", ".join(f"`{_plain(item)}`" for item in (*lora_layers.layer_names(config.lora), *blocks))


def _rates(config: Config) -> str:
    """Where the learning rate is another one."""
    ratio = config.optim.loraplus_ratio
    return _listed("factors", config.optim.lora_lr_pattern) + (f"; LoRA+ ratio {ratio:g}" if ratio != 1 else "")


def _listed(what: str, patterns: tuple[str, ...]) -> str:
    if not patterns:
        return ""
    shown = ", ".join(f"`{_plain(item)}`" for item in patterns[:MOST_PATTERNS])
    more = len(patterns) - MOST_PATTERNS
    return f"; {what}: {shown}" + (f" and {more} more" if more > 0 else "")


def _text_encoder(config: Config) -> dict[str, str]:
    """The row about CLIP's LoRA, if the file has one; diffusers and mindone load it with the transformer's."""
    lora, text = text_lora(config), config.text_encoder
    if lora is None:
        return {}
    rate = "" if config.optim.optimizer == "prodigy" else f", learning rate {text.text_encoder_lr:g}"
    steps = f", in the first {text.text_encoder_steps} steps" if text.text_encoder_steps else ""
    layers = ", ".join(f"`{layer}`" for layer in text.layers)
    return {"Text encoder (CLIP)": f"rank {lora.rank}, alpha {lora.alpha:g}{rate}{steps}; {layers}"}


def _concepts(config: Config) -> dict[str, str]:
    """The row about how several concepts are dealt."""
    parts = [f"`{_plain(c.name)}` x {c.repeats}, loss x {c.weight:g}" for c in concepts_of(config)]
    return {"Concepts": "; ".join(parts)} if len(parts) > 1 else {}


def _preserved(config: Config) -> dict[str, str]:
    words = dict.fromkeys(concept.class_word for concept in concepts_of(config) if concept.class_word is not None)
    if not words:
        return {}
    what = ", ".join(f"`{_plain(word)}`" if word else "the empty prompt" for word in words)
    return {"Preserved class": f"{what}, weight {config.data.preserve_weight:g}"}


def _average(config: Config) -> dict[str, str]:
    """The row about the running average of the weights, if there is one."""
    decay = config.optim.ema_decay
    if decay is None:
        return {}
    file = LORA_FILE if config.output.ema_export else EMA_LORA
    return {"Average (EMA)": f"decay {decay:g}, in `{file}`; the samples and the validation loss are of it"}


def _loss(config: Config) -> str:
    loss = config.loss
    sampling = f", timesteps by {loss.timestep_sampling}" if loss.timestep_sampling != "scheme" else ""
    sampling += f" {loss.flow_shift:g}" if loss.timestep_sampling == "shift" else ""
    robust = f"{loss.loss} with delta {loss.huber_delta:g} ({loss.huber_schedule}), " if loss.loss != "l2" else ""
    return f"{robust}weighting scheme {loss.weighting_scheme}{sampling}, guidance {loss.guidance_scale:g}"


def _plain(text: str) -> str:
    """Text for one line of Markdown between backticks, in a table as well."""
    return _on_one_line(text).replace("`", "'").replace("|", "/").replace("<", "(").replace(">", ")")


def _on_one_line(text: str) -> str:
    """Text of a file or a flag without line breaks and without characters that cannot be seen."""
    return printable(" ".join(text.split()))
