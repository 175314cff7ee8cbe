"""Every setting of a training run, its default and its meaning.

The field names are the names of the command-line flags and of the YAML keys; the text under a field is its help. In a
field's metadata, `basic` marks what --help shows, and `near` has the names that people try instead.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_origin

from flux_db.errors import UserError, did_you_mean

# Of --optimizer prodigy, unless it is given.
PRODIGY_RATE = 1.0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The FLUX.1 model to start from"""

    pretrained_model_name_or_path: str = field(
        metadata={"basic": True, "near": "model model_path base_model pretrained_model"}
    )
    """Folder of a FLUX.1 model in diffusers layout, or its name on the hub, such as black-forest-labs/FLUX.1-dev."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    variant: str | None = None
    """Variant of the weight files, such as fp16 for model.fp16.safetensors."""
    cache_dir: str | None = None
    """Folder for downloads from the hub. Without it the hub's own folder is used (HF_HOME)."""


@dataclass(frozen=True, kw_only=True)
class ConceptConfig:
    """An entry of --concepts as it was given. What is None or empty is as the flag under it says."""

    dir: str
    """--instance_data_dir"""
    prompt: str
    """--instance_prompt"""
    trigger: str | None = None
    """--trigger_word, which itself is not given with --concepts."""
    class_word: str | None = field(default=None, metadata={"key": "class"})
    """--preserve_class"""
    repeats: int | None = None
    """--repeats"""
    weight: float = 1.0
    """A factor on the loss of its pictures."""
    mask_dir: str | None = None
    """--mask_dir, which itself is not given with --concepts."""
    caption_dropout: float | None = None
    """--caption_dropout"""
    resolutions: tuple[int, ...] = ()
    """--resolution"""

    def as_dict(self) -> dict[str, Any]:
        """Key of the YAML file -> plain JSON value, of what is not at its default."""
        values = {key: (getattr(self, f.name), f.default) for key, f in CONCEPT_KEYS.items()}
        return {k: list(v) if isinstance(v, tuple) else v for k, (v, default) in values.items() if v != default}


# Key of the YAML file -> field: class is no name that Python allows.
CONCEPT_KEYS = {f.metadata.get("key", f.name): f for f in dataclasses.fields(ConceptConfig)}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Pictures and prompts"""

    instance_data_dir: str | None = field(
        default=None, metadata={"basic": True, "near": "data_dir train_data_dir image_dir data images pictures"}
    )
    """Folder with the pictures of the subject. Either this, --dataset_name or --concepts."""
    dataset_name: str | None = None
    """Hugging Face dataset with the pictures of the subject: a local folder, or its name on the hub. Needs the package
    datasets: pip install -e ".[datasets]"."""
    dataset_config_name: str | None = None
    """Configuration of --dataset_name, if it has several."""
    image_column: str = "image"
    """Column of --dataset_name with the pictures."""
    caption_column: str | None = None
    """Column of --dataset_name with the captions. Without it every picture has --instance_prompt."""
    instance_prompt: str | None = field(
        default=None, metadata={"basic": True, "near": "prompt caption", "unless": "concepts"}
    )
    """Prompt that names the subject by a rare word, such as "a photo of sks dog"; serves every picture without a
    caption. With --concepts each has its own."""
    concepts: tuple[ConceptConfig, ...] = ()
    """YAML file with several subjects or styles for one LoRA, as a list; in the file of --config the list itself can
    take its place. Keys of an entry: dir and prompt, and if they are wanted trigger, class, repeats, weight (factor on
    the loss), mask_dir, caption_dropout and resolutions. Takes the place of --instance_data_dir and
    --instance_prompt."""
    trigger_word: str | None = field(default=None, metadata={"near": "trigger token"})
    """Word that takes the place of {trigger} or [trigger] in captions, --instance_prompt and --validation_prompt. With
    --concepts each has its own."""
    with_prior_preservation: bool = False
    """Train on pictures of the subject's class as well, so that the model keeps what it knows of the class."""
    class_data_dir: str | None = field(default=None, metadata={"near": "reg_data_dir"})
    """Folder with class pictures; what is missing is generated into it. Without it: class in --output_dir. Needs
    --with_prior_preservation."""
    class_prompt: str | None = None
    """Prompt of the class pictures, such as "a photo of a dog". Needs --with_prior_preservation."""
    num_class_images: int = 100
    """Class pictures to have; with fewer in their folder the rest is generated before training."""
    prior_loss_weight: float = 1.0
    """Weight of the class pictures' loss beside the subject's."""
    sample_batch_size: int = 4
    """Class pictures to generate at a time."""
    preserve_class: str | None = None
    """Class of the subject, such as dog: hold the LoRA to what the base model answers to each caption with this word in
    the place of the trigger, so that the class stays as it was, without class pictures. The trigger is --trigger_word,
    or the word before the class in --instance_prompt, and must be in each caption. "" takes the empty prompt instead.
    A step has three times the rows."""
    preserve_weight: float = 1.0
    """Weight of the difference from the base model beside the subject's loss. Needs --preserve_class."""
    resolution: int = field(default=512, metadata={"basic": True, "near": "res size image_size"})
    """Side in pixels of the square that the model sees; a multiple of 16. A concept may have others or several by its
    key resolutions."""
    aspect_ratio_buckets: str | None = field(default=None, metadata={"near": "buckets enable_bucket"})
    """Instead of squares, crop each picture to the size of nearest shape: auto chooses sizes of about --resolution^2
    pixels by the pictures, or name them as height,width;height,width: 768,512 is a portrait, shown as 512 x 768. Every
    size is one more graph to compile."""
    max_buckets: int = 5
    """Most sizes of --aspect_ratio_buckets."""
    center_crop: bool = False
    """Crop the middle of each picture. Otherwise the crop is random: drawn once per picture with cached latents, anew
    for every example with --no-cache_latents."""
    cache_crops: int = 1
    """Random crops of each picture to keep with cached latents; every draw takes one of them."""
    random_flip: bool = field(default=False, metadata={"near": "flip flip_aug"})
    """Mirror pictures left to right in half of the draws. Not for subjects with writing on them."""
    repeats: int = field(default=1, metadata={"near": "num_repeats"})
    """How often each picture of the subject counts in one epoch."""
    mask_dir: str | None = field(default=None, metadata={"near": "masks"})
    """Folder with masks that have the names of their pictures: white is the subject, black the rest. name.mask.png next
    to a picture is its mask without this flag."""
    alpha_mask: bool = False
    """Take the alpha channel as the mask of pictures that have no other."""
    unmasked_weight: float = 0.1
    """Weight of the loss where a mask is black; where it is white the weight is 1. With 1 masks are not used."""
    caption_dropout: float = 0.0
    """Share of draws in which the subject's caption is replaced by the empty prompt."""
    alpha_background: str = "white"
    """Colour behind the transparent parts of pictures: a name such as grey, or #rrggbb (in quotes in YAML)."""
    max_sequence_length: int = field(default=512, metadata={"near": "max_token_length t5xxl_max_token_length"})
    """Tokens of a prompt that the T5 encoder sees, at most 512. Fewer save memory and time."""
    cache_latents: bool = True
    """Encode each picture once and train on the stored result; with --no-cache_latents the VAE stays in memory and
    encodes at every step."""
    encode_cache_dir: str | None = None
    """Folder for encoded prompts and pictures, which later runs use again. Without it: cache in --output_dir."""
    dataloader_num_workers: int = field(default=1, metadata={"near": "workers num_workers max_data_loader_n_workers"})
    """Threads that prepare batches ahead of training; 0 prepares each batch when it is needed."""


# What diffusers' script trains by default: attention and feed-forward of both streams.
DEFAULT_LAYERS = (
    "attn.to_k",
    "attn.to_q",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_k_proj",
    "attn.add_q_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The LoRA to train"""

    rank: int = field(default=16, metadata={"basic": True, "near": "r dim network_dim", "aliases": ("lora_rank",)})
    """Inner width of the LoRA matrices: more learns more detail and makes a larger file."""
    lora_alpha: float | None = field(default=None, metadata={"near": "alpha network_alpha"})
    """The LoRA is applied with strength alpha / rank. Without it alpha equals the rank."""
    lora_dropout: float = field(default=0.0, metadata={"near": "dropout network_dropout"})
    """Share of the LoRA's inputs set to zero at random during training."""
    lora_compute: Literal["base", "fp32"] = "base"
    """Precision of the LoRA's products and of their gradients: that of the frozen model, or float32. The weights that
    are trained, the sum of the gradients and the optimizer are in float32 with both."""
    lora_layers: str | None = field(default=None, metadata={"near": "layers target_modules"})
    """Transformer modules that get a LoRA, with commas between: names such as attn.to_q, or attention, default
    (attention and feed-forward of both streams) or all (every linear layer of the blocks). single:7,12 or double:0-5
    beside them, or alone, limits these to some blocks. Without it: default."""
    lora_rank_pattern: tuple[str, ...] = ()
    """Another rank for some layers, as EXPRESSION=RANK: a regular expression that fits the end of a layer's name, from
    a dot on, such as "attn\\.to_(q|k)=8"; ^ before it asks for the whole name. alpha / rank stays the same. Repeat the
    flag for several; the first that fits counts."""
    init_lora: str | None = field(default=None, metadata={"near": "network_weights"})
    """LoRA to start from instead of a fresh one: a file of any format that export reads, or the folder of a run. Rank,
    alpha and layers are the file's unless they are given; a rank in the YAML file gives way to it, one on the command
    line does not. The optimizer starts afresh."""
    init_lora_resize: bool = False
    """Bring the LoRA of --init_lora to the rank of this run, by singular values. Otherwise another rank on the command
    line is refused."""
    init_lora_transformer_only: bool = False
    """Take only the transformer's layers from --init_lora; with --train_text_encoder CLIP's LoRA then starts afresh.
    Otherwise the file must have layers of CLIP if CLIP is trained, and must have none if it is not."""

    @property
    def alpha(self) -> float:
        """lora_alpha, or the rank where it is not given."""
        return float(self.rank) if self.lora_alpha is None else self.lora_alpha


# The linear layers of CLIP's text model that can have a LoRA; the first four are what diffusers' script trains.
TEXT_ENCODER_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig:
    """The LoRA of the text encoder"""

    train_text_encoder: bool = False
    """Train a LoRA of the CLIP text encoder as well. CLIP then runs inside the training step and stays in memory; T5's
    embeddings are encoded once as always."""
    text_encoder_lr: float = 5e-6
    """Learning rate of the text encoder's LoRA after warm-up, on the course of --lr_scheduler. --scale_lr leaves it as
    it is. Prodigy finds one step size for both LoRAs and does not take it."""
    adam_weight_decay_text_encoder: float = 1e-3
    """Decoupled weight decay on the weights of the text encoder's LoRA, for both optimizers."""
    text_encoder_rank: int | None = None
    """Rank of the text encoder's LoRA, whose strength alpha / rank is that of the transformer's. Without it: --rank."""
    text_encoder_layers: str | None = None
    """Layers of the text encoder that get a LoRA, with commas between, or all: q_proj, k_proj, v_proj, out_proj, fc1,
    fc2. Without it: the first four, which are the attention's."""
    text_encoder_steps: int | None = None
    """Train the text encoder's LoRA in so many optimizer steps only, the first ones; then it stays as it is. Without
    it: in all."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names in --text_encoder_layers, all that there are, or those of the attention."""
        if self.text_encoder_layers is None:
            return TEXT_ENCODER_LAYERS[:4]
        names = tuple(name.strip() for name in self.text_encoder_layers.split(",") if name.strip())
        return TEXT_ENCODER_LAYERS if names == ("all",) else names


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Loss and timesteps"""

    guidance_scale: float = field(default=1.0, metadata={"near": "guidance"})
    """Guidance value given to a guidance-distilled model such as FLUX.1-dev while training."""
    weighting_scheme: Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"] = "none"
    """How timesteps are drawn (logit_normal, mode; the others uniformly) and the loss is weighted (sigma_sqrt, cosmap;
    the others evenly)."""
    logit_mean: float = 0.0
    """Mean of --weighting_scheme logit_normal; no other takes it."""
    logit_std: float = 1.0
    """Standard deviation of --weighting_scheme logit_normal; no other takes it."""
    timestep_sampling: Literal["scheme", "uniform", "sigmoid", "shift", "flux_shift"] = "scheme"
    """How noise levels are drawn. scheme: by --weighting_scheme, whose weights apply with the others too. uniform;
    sigmoid: the middle is preferred; shift: the same moved towards more noise by --flow_shift; flux_shift: moved by the
    size of the picture, as FLUX.1 itself was trained."""
    sigmoid_scale: float = 1.0
    """Width of sigmoid, shift and flux_shift: more draws more of both ends."""
    flow_shift: float = field(default=3.0, metadata={"near": "shift discrete_flow_shift"})
    """Shift of --timestep_sampling shift; 1 is none."""
    mode_scale: float = 1.29
    """Scale of the mode scheme: above 0 prefers the middle timesteps, below 0 the ends."""
    loss: Literal["l2", "huber", "smooth_l1"] = field(default="l2", metadata={"near": "loss_type"})
    """Error of the prediction at each latent: its square (l2), or one that grows like the square below a threshold and
    linearly above it, so that outliers count less: huber, or smooth_l1, which is huber divided by the threshold."""
    huber_delta: float = field(default=0.1, metadata={"near": "huber_c"})
    """Threshold of huber and smooth_l1; with --huber_schedule exponential that of pure noise."""
    huber_schedule: Literal["constant", "exponential"] = "exponential"
    """Threshold at noise level sigma: --huber_delta at each (constant), or --huber_delta to the power of sigma
    (exponential): 1 without noise, so nearly l2 there, and --huber_delta at pure noise."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Length of training, optimizer and learning rate"""

    train_batch_size: int = field(default=1, metadata={"basic": True, "near": "batch batch_size"})
    """Pictures of the subject in a batch, on each device."""
    gradient_accumulation_steps: int = field(
        default=1, metadata={"near": "accumulation_steps gradient_accumulation grad_accum"}
    )
    """Batches whose gradients are averaged into one optimizer step."""
    num_train_epochs: int = field(default=1, metadata={"near": "epochs num_epochs max_train_epochs"})
    """Passes over the pictures. --max_train_steps overrides it."""
    max_train_steps: int | None = field(
        default=None, metadata={"basic": True, "near": "steps max_steps num_steps train_steps iterations"}
    )
    """Optimizer steps to train, instead of counting epochs."""
    max_train_minutes: float | None = None
    """Stop after so many minutes of training with a checkpoint and exit code 0; --resume_from_checkpoint latest goes on
    for as long again. Compiling, samples and saving count, what comes before the training does not. At least one step
    is taken."""
    optimizer: Literal["adamw", "prodigy"] = field(default="adamw", metadata={"near": "optim optimizer_type"})
    """adamw, or prodigy, which finds its own step size."""
    learning_rate: float = field(default=1e-4, metadata={"basic": True, "near": "lr unet_lr"})
    """Learning rate after warm-up. Prodigy takes it as a factor on its own step size, by default 1."""
    lora_lr_pattern: tuple[str, ...] = ()
    """Another learning rate for some layers of the transformer, as EXPRESSION=FACTOR, by which the rate is multiplied;
    expressions as in --lora_rank_pattern. Repeat the flag for several; the first that fits counts. Not with Prodigy."""
    loraplus_ratio: float = 1.0
    """LoRA+: learning rate of the LoRA's B matrices, divided by that of its A matrices; 16 is usual, then with a lower
    --learning_rate. Not with Prodigy."""
    scale_lr: bool = False
    """Multiply the learning rate by batch size, accumulation steps and number of devices."""
    lr_scheduler: Literal[
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
    ] = field(default="constant", metadata={"near": "scheduler"})
    """Course of the learning rate over the run."""
    lr_warmup_steps: int = field(default=0, metadata={"near": "warmup warmup_steps"})
    """Optimizer steps over which the learning rate rises from 0. --lr_scheduler constant ignores them."""
    lr_num_cycles: int = field(default=1, metadata={"near": "lr_scheduler_num_cycles"})
    """Cycles of --lr_scheduler cosine_with_restarts; no other takes it."""
    lr_power: float = 1.0
    """Exponent of --lr_scheduler polynomial; no other takes it."""
    adam_beta1: float = 0.9
    """Decay of the running mean of gradients, for both optimizers."""
    adam_beta2: float = 0.999
    """Decay of the running mean of squared gradients, for both optimizers."""
    adam_weight_decay: float = field(default=1e-4, metadata={"near": "weight_decay"})
    """Decoupled weight decay on the LoRA weights, for both optimizers."""
    adam_epsilon: float = 1e-8
    """Added to the denominator of the update, for both optimizers."""
    max_grad_norm: float = field(default=1.0, metadata={"near": "clip_grad grad_clip"})
    """Gradients with a larger norm are scaled down to it."""
    ema_decay: float | None = field(default=None, metadata={"near": "ema use_ema"})
    """Keep a running average of the LoRA's weights with this decay, usually 0.99: samples, validation loss and
    --keep_best are of the average, and it is written as ema_lora.safetensors. Without it there is none."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Sample pictures and validation loss while training"""

    validation_prompt: tuple[str, ...] = field(default=(), metadata={"basic": True, "near": "sample_prompt"})
    """Prompt to draw sample pictures from, such as "{instance_prompt} in a bucket", in which the words of
    --instance_prompt take the place of {instance_prompt}; {class_prompt} works in the same way. Repeat the flag for
    several; without a prompt there are no samples."""
    validation_prompts_file: str | None = field(default=None, metadata={"near": "sample_prompts"})
    """Text file with a prompt in each line to draw samples from as well. Empty lines and lines with # are left out. A
    line may end in options of its own samples: --w 768 --h 512 --seed 3 --steps 20 --guidance 4 --lora 0.8, of which
    the last is a factor on the LoRA's strength."""
    num_validation_images: int = 4
    """Pictures per prompt, each with its own fixed noise."""
    validation_epochs: int = field(default=50, metadata={"near": "sample_every_n_epochs"})
    """Validate every so many epochs. --validation_steps overrides it."""
    validation_steps: int | None = field(
        default=None, metadata={"basic": True, "near": "sample_every_n_steps sample_every"}
    )
    """Validate every so many optimizer steps instead of by epochs."""
    validation_size: str | None = None
    """Height x width of the samples in pixels: 768x512 is a portrait, shown as 512 x 768. Without it: --resolution."""
    validation_inference_steps: int = field(default=28, metadata={"near": "inference_steps num_inference_steps"})
    """Denoising steps per sample."""
    validation_guidance: float = 3.5
    """Guidance value while drawing samples."""
    vae_tiling: Literal["auto", "on", "off"] = field(default="auto", metadata={"alone": "on"})
    """Decode samples and class pictures in overlapping tiles of 64 latents, 512 px with FLUX.1's VAE, so that the VAE
    takes the memory of a tile. auto: pictures with more than 1024 x 1024 pixels."""
    validation_seed: int = 42
    """Start of the noise of samples and of the validation loss. It is not --seed, so that runs with different seeds can
    be compared."""
    validation_data_dir: str | None = None
    """Folder with pictures of the subject that are not trained on; their loss is measured at every validation."""
    validation_share: float = 0.0
    """Instead of --validation_data_dir: hold out about this share of the pictures of the subject, and at least one of
    each concept. A picture's content decides which."""
    score_steps: int | None = None
    """Score samples every so many optimizer steps, at the first step and at the last: how well they show the subject
    and follow their prompts. Samples are drawn at these steps too. --score_dino and --score_clip measure; without both
    it is the judge of the small model's drawn world, which knows no other pictures."""
    score_dino: str | None = None
    """DINOv2 that scores samples: a folder, or its name on the hub, such as facebook/dinov2-base."""
    score_clip: str | None = None
    """CLIP that scores samples: a folder, or its name on the hub, such as openai/clip-vit-large-patch14."""
    keep_best: Literal["none", "loss", "score"] = field(default="none", metadata={"alone": "loss"})
    """Keep the best LoRA as best_lora.safetensors beside the last one. loss, which the flag alone means: the one with
    the lowest validation loss. score: the one with the highest score of --score_steps."""
    early_stop_patience: int | None = None
    """End the run after so many validation rounds in a row that were not better than the best before them, by what
    --keep_best watches: the validation loss, or the score. The run has then finished."""

    @property
    def has_held_out(self) -> bool:
        """Whether a validation loss is asked for."""
        return self.validation_data_dir is not None or self.validation_share > 0


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Files written, checkpoints and resuming"""

    output_dir: str = field(
        default="flux-dreambooth-lora", metadata={"basic": True, "near": "out output out_dir output_path save_dir"}
    )
    """Folder for everything the run writes."""
    dry_run: bool = False
    """Only check settings and pictures and print what the run would do, as python -m flux_db check does; then end."""
    seed: int = 42
    """Start of every random draw: the same seed and settings give the same LoRA file."""
    checkpointing_steps: int = field(
        default=500, metadata={"basic": True, "near": "save_steps save_every save_every_n_steps"}
    )
    """Save a checkpoint every so many optimizer steps."""
    checkpoints_total_limit: int | None = field(default=None, metadata={"near": "save_total_limit"})
    """Keep this many checkpoints; the oldest goes once a new one is safe on disk. Without it all are kept."""
    resume_from_checkpoint: str | None = field(default=None, metadata={"basic": True, "near": "resume"})
    """Path of a checkpoint folder to go on from, or latest for the newest sound one in --output_dir."""
    allow_changed: tuple[str, ...] = ()
    """Settings that may differ from the checkpoint's on resume although they change the result. Repeat the flag, or put
    commas between names."""
    max_skipped_steps: int = 20
    """Stop after so many optimizer steps in a row were skipped for gradients that are not finite, or if the first so
    many had no gradient at all."""
    upcast_before_saving: bool = False
    """Write the final LoRA file in float32 instead of the training precision. Checkpoints are always float32."""
    ema_export: bool = False
    """Write the average of --ema_decay as the final LoRA file, in the place of the last weights."""
    report_to: tuple[str, ...] = field(default=("tensorboard",), metadata={"near": "tracker log_with"})
    """Where curves and samples are shown besides metrics.jsonl and report.html, which are always written: tensorboard,
    wandb, swanlab or none. Repeat the flag for several, or put commas between names."""
    logging_dir: str = field(default="logs", metadata={"near": "log_dir"})
    """Folder for TensorBoard's files, inside --output_dir."""

    @property
    def changes_allowed(self) -> frozenset[str]:
        """Names in --allow_changed, whether repeated or with commas."""
        return frozenset(name.strip() for item in self.allow_changed for name in item.split(",") if name.strip())

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names in --report_to, whether repeated or with commas; none is no name."""
        names = dict.fromkeys(name.strip() for item in self.report_to for name in item.split(",") if name.strip())
        return tuple(name for name in names if name != "none")


@dataclass(frozen=True, kw_only=True)
class HubConfig:
    """Upload to the Hugging Face hub"""

    push_to_hub: bool = False
    """Upload the LoRA, its model card and the last samples after training. Needs a token: log in with hf auth login or
    set HF_TOKEN; --hub_token works too, but its value stays in the shell's history."""
    hub_model_id: str | None = field(default=None, metadata={"near": "repo_id huggingface_repo_id"})
    """Where to upload to: owner/name, or a name under the token's owner. Without it: the name of --output_dir."""
    hub_private: bool = field(default=True, metadata={"near": "private"})
    """Only you can see the uploaded model; --no-hub_private makes it public."""


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Device, precision and speed"""

    device: Literal["auto", "Ascend", "CPU"] = field(default="auto", metadata={"near": "device_target"})
    """auto takes Ascend where there is one, otherwise the CPU, and prints why."""
    mixed_precision: Literal["no", "fp16", "bf16"] = field(
        default="no", metadata={"basic": True, "near": "precision dtype bf16 fp16"}
    )
    """Precision of the frozen model and of all products; the LoRA's own weights are always float32. bf16 is recommended
    on Ascend and refused on the CPU, whose backend has no bf16 kernels."""
    base_precision: Literal["full", "int8"] = field(default="full", metadata={"near": "int8 quantize fp8_base"})
    """How the frozen transformer is stored. full: in --mixed_precision. int8: the matrices of its blocks as int8 with a
    scale for each row, made while loading; they become whole in --mixed_precision where they are used. Half of the
    memory of bf16, for a little precision."""
    gradient_checkpointing: str = field(
        default="none", metadata={"basic": True, "near": "recompute use_recompute", "alone": "blocks"}
    )
    """What the backward pass computes again instead of keeping it: less memory on Ascend, slower steps. blocks, which
    the flag alone means: everything but the inputs of the transformer's blocks. attention: the attention layers only.
    A number: that many blocks, the first ones. none: nothing."""
    jit_level: Literal["O0", "O1", "O2"] = "O1"
    """MindSpore's compilation level on Ascend; O2 cannot accumulate gradients, and MindSpore 2.9 and later are about to
    remove it. The CPU always compiles at O0."""
    deterministic: bool = True
    """Ask Ascend for the same bits in every run, which exact resuming needs. Its price is slower gradients of the
    attention and slower collectives; --no-deterministic saves that. The CPU computes the same bits in any case."""
    compile_cache: Literal["auto", "on", "off"] = "auto"
    """Store what is compiled, so that a later run or a resume does not compile the same again; the result is the
    same. auto is on with the CPU, and off with Ascend, where nobody has tried it. For other commands than the trainer,
    MS_COMPILER_CACHE_ENABLE=0 turns it off."""
    compile_cache_dir: str | None = None
    """Folder for compiled graphs. Without it: flux_db/graphs in XDG_CACHE_HOME or in .cache of the home
    folder."""
    distributed: bool = field(default=False, metadata={"near": "use_parallel"})
    """Demand several devices: refused in a process that msrun did not start. Under msrun it need not be given."""
    shard_base: bool = False
    """Spread the frozen transformer over the devices, for devices with less memory; each weight is gathered when it is
    used. The result is the same."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one run."""

    model: ModelConfig
    data: DataConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    text_encoder: TextEncoderConfig = field(default_factory=TextEncoderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


# Where a run can be shown, and the package each needs.
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "swanlab": "swanlab"}

SECTIONS: dict[str, type] = {section.name: section.type for section in dataclasses.fields(Config)}


def to_flat_dict(config: Config) -> dict[str, Any]:
    """Flag name -> plain JSON value, in the order of the sections."""
    return {
        f.name: _plain(getattr(getattr(config, section), f.name))
        for section, cls in SECTIONS.items()
        for f in dataclasses.fields(cls)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, ConceptConfig):
        return value.as_dict()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def concept_from_dict(values: Mapping[str, Any]) -> ConceptConfig:
    """The reverse of ConceptConfig.as_dict."""
    given = {CONCEPT_KEYS[key].name: value for key, value in values.items()}
    return ConceptConfig(**given | {"resolutions": tuple(given.get("resolutions", ()))})


def from_flat_dict(values: Mapping[str, Any]) -> Config:
    """The reverse of to_flat_dict. Settings not given are at their defaults."""
    names = {section: [f.name for f in dataclasses.fields(cls)] for section, cls in SECTIONS.items()}
    known = {name for section in names.values() for name in section}
    problems = [f"{name}: no such setting{did_you_mean(name, known)}" for name in values if name not in known]
    problems += [
        f"{f.name}: the setting is missing"
        for cls in SECTIONS.values()
        for f in dataclasses.fields(cls)
        if is_required(f) and f.name not in values and not values.get(f.metadata.get("unless", ""))
    ]
    if problems:
        raise UserError(problems)
    lists = {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls) if get_origin(f.type) is tuple}
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    frozen |= {name: (frozen[name],) for name in lists if isinstance(frozen.get(name), str)}
    frozen |= _switches_of_older_versions(frozen)
    concepts = frozen.get("concepts", ())
    frozen["concepts"] = tuple(concept_from_dict(c) if isinstance(c, Mapping) else c for c in concepts)
    if frozen.get("optimizer") == "prodigy":
        frozen.setdefault("learning_rate", PRODIGY_RATE)
    return Config(
        **{
            section: cls(**{name: frozen[name] for name in names[section] if name in frozen})
            for section, cls in SECTIONS.items()
        }
    )


def is_required(f: dataclasses.Field) -> bool:
    """Whether a setting must be given, be it only where another is not."""
    return f.default is dataclasses.MISSING or "unless" in f.metadata


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings recorded by an older version, with those that it did not know yet at their defaults."""
    defaults = {
        f.name: list(f.default) if isinstance(f.default, tuple) else f.default
        for cls in SECTIONS.values()
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING
    }
    return defaults | dict(values) | _switches_of_older_versions(values)


def _switches_of_older_versions(values: Mapping[str, Any]) -> dict[str, str]:
    """Settings that were switches once and have several values now."""
    meant = {"gradient_checkpointing": "blocks", "keep_best": "loss"}
    return {name: on if values[name] else "none" for name, on in meant.items() if isinstance(values.get(name), bool)}
