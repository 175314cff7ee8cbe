"""The graphs that an Ascend device would run, compiled on a machine without one, up to the choice of kernels.

MindSpore's front end does not depend on the device: it traces, differentiates, recomputes and optimises in the same
way, and only then looks for kernels. A CPU has none for bf16 or for flash attention, so compiling ends there with an
error, and the graph has been written by then. `ir.py` reads it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from mindspore.amp import DynamicLossScaler
from mindspore.nn.utils import no_init_parameters

from flux_db.data.encode import CLIP_TOKENS
from flux_db.data.timesteps import robust_table
from flux_db.errors import UserError
from flux_db.graph import ir
from flux_db.model import adapter, int8_linear, operators, optim, preservation, runtime, sharding, text_encoder
from flux_db.model.optim import SecondPart
from flux_db.model.quiet import quiet
from flux_db.model.runtime import Runtime
from flux_db.model.sampler import EulerStep
from flux_db.settings.derived import Recomputed, text_lora
from flux_db.settings.preserved import is_preserved
from flux_db.settings.schema import Config, RuntimeConfig, from_flat_dict
from flux_db.stream import DROPOUT_NUMBERS
from flux_db.train_step import StepSettings, TrainStepForFluxDevDB
from flux_db.training.build import recompute
from flux_db.training.validation_loss import FlowLoss
from flux_db.weight_file import Share

# FLUX.1-dev has 19 double and 38 single blocks. Cost is linear in blocks, so one of each kind shows it all.
TRUE_WIDTHS = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
SMALL_WIDTHS = {
    **TRUE_WIDTHS,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}
LATENT_CHANNELS = 16
NONE = Recomputed("none")
DEVICES = 8
CLIP_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step to compile."""

    widths: dict[str, Any] = field(default_factory=lambda: SMALL_WIDTHS)
    pixels: int = 80
    tokens: int = 24
    batch: int = 1
    dtype: ms.Type = ms.bfloat16
    recomputed: Recomputed = Recomputed("blocks")  # noqa: RUF009
    accumulation: int = 1
    devices: int = 1
    shard_base: bool = False
    is_int8: bool = False
    prior: bool = False
    masked: bool = False
    concepts: int = 0
    """So many, whose errors are summed apart."""
    clip: bool = False
    """CLIP is trained too."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Further settings of the LoRA, the loss and the optimizer."""

    @property
    def config(self) -> Config:
        required = {"pretrained_model_name_or_path": "-", "instance_data_dir": "-", "instance_prompt": "sks dog"}
        return from_flat_dict(required | {"rank": 4} | self.flags)

    @property
    def examples(self) -> int:
        return self.batch * (2 if self.prior else 1)

    @property
    def rows(self) -> int:
        """Of the transformer's batch."""
        return self.examples * (preservation.PARTS if is_preserved(self.config) else 1)

    @property
    def prompts(self) -> int:
        return self.examples * (2 if is_preserved(self.config) else 1)

    @property
    def image_tokens(self) -> int:
        return (self.pixels // 16) ** 2


def training_step(case: Case) -> str:
    """The text of the graph of one training step on Ascend."""
    with _for_ascend(lambda: _build_step(case)) as step:
        return compiled(step, _step_inputs(case))


def _build_step(case: Case) -> TrainStepForFluxDevDB:
    config = case.config
    transformer = build_transformer(case.widths, case.dtype, is_int8=case.is_int8)
    if case.shard_base:
        _cut(transformer, Share(0, case.devices))
    key = adapter.inject(transformer, config.lora, 0, case.rows, _lora_dtype(case))
    if is_preserved(config):
        adapter.add_row_gates(transformer)
    with _pretended_devices(case.devices):
        if case.shard_base:
            sharding.shard_base(transformer, Runtime(device="Ascend", dtype=case.dtype, world_size=case.devices))
        recompute(transformer, case.recomputed)
        weights, text, second = list(adapter.parameters(transformer).values()), None, None
        if case.clip:
            text = build_clip(case.widths["pooled_projection_dim"], case.dtype)
            adapter.inject_text_encoder(text, text_lora(config), 0, _lora_dtype(case), key)
            if is_preserved(config):
                adapter.add_row_gates(text)
            weights += list(adapter.parameters(text).values())
            second = SecondPart(len(adapter.parameters(text)), 1e-3)
        optimizer = optim.build_optimizer(weights, config.optim, second=second)
        scaler = DynamicLossScaler(2.0**16, 2, 2000) if case.dtype == ms.float16 else None
        settings = _settings(case)
        step = TrainStepForFluxDevDB(
            transformer, optimizer, settings, text_encoder=text, loss_scaler=scaler, dropout_key=key
        )
    step.set_train(True)
    if text is not None:
        text_encoder.set_training(text)
    return step


def _cut(transformer: nn.Cell, share: Share) -> None:
    """Leave of every weight what a rank reads of it."""
    divisible = sharding.divisible_parameters(transformer)
    for name, parameter in transformer.parameters_and_names():
        parameter.sliced = name in divisible and share.divides(parameter.shape)
        if parameter.sliced:
            shape = (parameter.shape[0] // share.count, *parameter.shape[1:])
            parameter.set_data(Tensor(np.zeros(shape, np.int8)).astype(parameter.dtype), slice_shape=True)


def _lora_dtype(case: Case) -> ms.Type:
    return ms.float32 if case.config.lora.lora_compute == "fp32" else case.dtype


def _settings(case: Case) -> StepSettings:
    table = np.linspace(1.0, 0.001, 1000, dtype=np.float32)
    loss, data = case.config.loss, case.config.data
    return StepSettings(
        sigmas=table,
        timesteps=table,
        weights=np.ones_like(table),
        vae_shift=0.1,
        vae_scale=0.3,
        guidance_scale=1.0,
        prior_loss_weight=1.0 if case.prior else None,
        preserve_weight=data.preserve_weight if is_preserved(case.config) else None,
        robust=robust_table(loss.loss, loss.huber_delta, loss.huber_schedule, table),
        concepts=case.concepts,
        accumulation=case.accumulation,
        world_size=case.devices,
        dtype=case.dtype,
    )


def _step_inputs(case: Case) -> list[Tensor]:
    side = case.pixels // 8
    latent = (case.examples, LATENT_CHANNELS, side, side)
    inputs = [
        _zeros(case.examples, 2 * LATENT_CHANNELS, side, side),
        _zeros(*latent),
        _zeros(*latent),
        Tensor(np.zeros(case.examples, np.int32)),
        _zeros(case.prompts, case.tokens, case.widths.get("joint_attention_dim", 4096)),
        Tensor(np.zeros((case.prompts, CLIP_TOKENS), np.int32))
        if case.clip
        else _zeros(case.prompts, case.widths.get("pooled_projection_dim", 768)),
        _zeros(case.prompts, DROPOUT_NUMBERS),
        _zeros(3) if case.clip else Tensor(np.float32(1e-4)),
        Tensor(np.array(True)),
    ]
    inputs += [_zeros(case.examples, 1, side, side)] if case.masked else []
    return inputs + ([_zeros(case.examples, case.concepts)] if case.concepts else [])


def _zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32))


# --- networks ----------------------------------------------------------------------------------------------------


def build_transformer(widths: dict[str, Any], dtype: ms.Type, *, is_int8: bool = False) -> nn.Cell:
    """Without values: compiling needs shapes and types only."""
    with quiet():
        from mindone.diffusers import FluxTransformer2DModel

        with no_init_parameters():
            transformer = FluxTransformer2DModel(**widths)
            if is_int8:
                int8_linear.convert(transformer)
    matrices = int8_linear.scales(transformer)
    _frozen(transformer, dtype)
    for name, parameter in transformer.parameters_and_names():
        if name in matrices:
            parameter.set_dtype(ms.int8)
    return transformer


def _frozen(cell: nn.Cell, dtype: ms.Type) -> nn.Cell:
    for parameter in cell.get_parameters():
        parameter.requires_grad = False
        parameter.set_dtype(dtype)
    return cell.set_train(False)


def validation_loss() -> str:
    def build() -> nn.Cell:
        return FlowLoss(build_transformer(SMALL_WIDTHS, ms.bfloat16), _settings(Case())).set_train(False)

    with _for_ascend(build) as loss:
        pictures, _, noise, index, prompt, pooled, *_ = _step_inputs(Case())
        return compiled(loss, [pictures, noise, index, prompt, pooled])


def sampler(case: Case | None = None) -> str:
    """One denoising step, as the sampler calls it; of a case its network, sizes and type."""
    case = case or Case()

    def build() -> nn.Cell:
        return EulerStep(build_transformer(case.widths, case.dtype, is_int8=case.is_int8)).set_train(False)

    with _for_ascend(build) as step:
        hidden = _zeros(case.batch, case.image_tokens, 4 * LATENT_CHANNELS)
        *_, text, pooled, _, _, _ = _step_inputs(case)
        hidden, text, pooled = (tensor.astype(case.dtype) for tensor in (hidden, text, pooled))
        text_ids, image_ids, each = _zeros(case.tokens, 3), _zeros(case.image_tokens, 3), _zeros(case.batch)
        return compiled(step, [hidden, each, Tensor(0.0, ms.float32), each, text, pooled, text_ids, image_ids])


class _AsEncoded(nn.Cell):
    """A text encoder as data/encode.py calls it."""

    def __init__(self, model: nn.Cell) -> None:
        super().__init__()
        self.model = model

    def construct(self, ids: Tensor) -> Any:
        return self.model(ids, return_dict=False)


def t5(dtype: ms.Type = ms.bfloat16) -> str:
    def build() -> nn.Cell:
        from mindone.transformers import T5EncoderModel
        from transformers import T5Config

        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
        config = T5Config(**shape, feed_forward_proj="gated-gelu", use_cache=False)
        return _AsEncoded(_frozen(T5EncoderModel(config), dtype))

    with _for_ascend(build) as model:
        return compiled(model, [Tensor(np.zeros((1, 16), np.int32))])


def build_clip(width: int, dtype: ms.Type) -> nn.Cell:
    """CLIP's text model of two layers."""
    with quiet():
        from mindone.transformers import CLIPTextModel
        from transformers import CLIPTextConfig

        layers = CLIP_LAYERS
        shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
        return _frozen(CLIPTextModel(CLIPTextConfig(**shape, num_attention_heads=4, vocab_size=64)), dtype)


def clip(dtype: ms.Type = ms.bfloat16) -> str:
    with _for_ascend(lambda: _AsEncoded(build_clip(32, dtype))) as model:
        return compiled(model, [Tensor(np.zeros((1, 77), np.int32))])


class _Encode(nn.Cell):
    def __init__(self, vae: nn.Cell) -> None:
        super().__init__()
        self.vae = vae

    def construct(self, pictures: Tensor) -> Tensor:
        return self.vae.encode(pictures)[0]


class _Decode(_Encode):
    def construct(self, pictures: Tensor) -> Tensor:
        return self.vae.decode(pictures, return_dict=False)[0]


def vae(*, decode: bool) -> str:
    """In fp32, as the program runs it."""

    def build() -> nn.Cell:
        from mindone.diffusers import AutoencoderKL

        model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        return (_Decode if decode else _Encode)(_frozen(model, ms.float32))

    with _for_ascend(build) as model:
        return compiled(model, [_zeros(1, LATENT_CHANNELS, 8, 8) if decode else _zeros(1, 3, 16, 16)])


# --- compiling ---------------------------------------------------------------------------------------------------


@contextmanager
def _for_ascend(build: Any) -> Iterator[Any]:
    """A cell that is built with the CPU's operators, because building runs some, and compiled with Ascend's."""
    operators.install("CPU")
    try:
        with quiet():
            cell = build()
        operators.install("Ascend")
        yield cell
    finally:
        operators.install("CPU")


@contextmanager
def _pretended_devices(count: int) -> Iterator[None]:
    """Collectives are built as if `count` processes had joined."""
    from mindspore.ops.operations import comm_ops

    pretended = {"get_group_size": lambda *_, **__: count, "get_rank": lambda *_, **__: 0} if count > 1 else {}
    originals = {name: getattr(comm_ops, name) for name in pretended}
    try:
        vars(comm_ops).update(pretended)
        yield
    finally:
        vars(comm_ops).update(originals)


def compiled(cell: nn.Cell, inputs: Sequence[Tensor]) -> str:
    """The text of the cell's graph as the back end would get it."""
    with tempfile.TemporaryDirectory() as folder:
        # to write the graph after every pass takes half of the time
        dumped = {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": folder, "MS_DEV_DUMP_IR_PASSES": ir.LAST_PASS}
        os.environ.update(dumped)
        try:
            cell.compile(*inputs)
        except (RuntimeError, TypeError) as error:
            if "Kernel select failed" not in str(error):
                raise
        finally:
            for name in dumped:
                del os.environ[name]
        if (file := ir.newest(Path(folder))) is None:
            raise UserError("MindSpore wrote no graph: this build cannot save graphs")
        return file.read_text(encoding="utf-8", errors="replace")


EVERYTHING = Case(accumulation=2, devices=DEVICES, prior=True, masked=True, flags={"lora_dropout": 0.1})
WITH_CLIP = Case(
    accumulation=2,
    devices=DEVICES,
    prior=True,
    clip=True,
    flags={"lora_dropout": 0.1, "train_text_encoder": True, "text_encoder_rank": 5, "text_encoder_layers": "all"},
)
LEVERS = Case(
    accumulation=2,
    devices=DEVICES,
    masked=True,
    concepts=2,
    flags={"preserve_class": "dog", "ema_decay": 0.99, "loss": "huber", "lora_dropout": 0.1},
)
GRAPHS: dict[str, Callable[[], str]] = {
    # with two blocks of each kind in a row: what a block keeps is the next one's input
    "step": lambda: training_step(Case(widths={**SMALL_WIDTHS, "num_layers": 2, "num_single_layers": 2})),
    "everything": lambda: training_step(EVERYTHING),
    "fp16, attention": lambda: training_step(
        Case(dtype=ms.float16, recomputed=Recomputed("attention"), flags={"optimizer": "prodigy"})
    ),
    "with CLIP": lambda: training_step(WITH_CLIP),
    "levers": lambda: training_step(LEVERS),
    "sharded": lambda: training_step(Case(devices=DEVICES, shard_base=True)),
    "int8, nothing recomputed": lambda: training_step(Case(is_int8=True, recomputed=NONE)),
    "int8, sharded": lambda: training_step(Case(devices=DEVICES, shard_base=True, is_int8=True)),
    "sampler": sampler,
    "validation loss": validation_loss,
    "T5": t5,
    "CLIP": clip,
    "VAE encoder": lambda: vae(decode=False),
    "VAE decoder": lambda: vae(decode=True),
}
"""What the program runs on Ascend, at small widths."""


def main(argv: Sequence[str]) -> None:
    """`python -m flux_db.graph.ascend_graph FOLDER NAME ...`: a file for each graph; in a process of its own, because a
    compilation that ended in an error may disturb the next one that is meant to run."""
    folder, *names = argv
    runtime.start(RuntimeConfig(device="CPU", compile_cache="off"))
    for name in names:
        Path(folder, f"{name}.ir").write_text(GRAPHS[name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
