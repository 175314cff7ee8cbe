"""What goes into a training step and what comes out of it: the one place that knows the order."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepInputs(NamedTuple):
    """A micro-batch, as arrays or as tensors. B rows; with prior preservation the second half are of the class.

    With --preserve_class prompt_embeds, pooled_prompt_embeds and dropout_key have 2 B rows: the second half are of the
    class, for the same pictures.
    """

    pictures: Any
    """[B, 2C, h, w] latent moments; or [B, 3, H, W] pixels in -1..1, if the step has a VAE"""
    eps: Any
    """[B, C, h, w] standard normal, for the VAE's posterior"""
    noise: Any
    """[B, C, h, w] standard normal, for the flow"""
    index: Any
    """[B] timestep index"""
    prompt_embeds: Any
    """[B, L, D] of T5"""
    pooled_prompt_embeds: Any
    """[B, D'] of CLIP; or [B, 77] token ids, if the step has CLIP"""
    dropout_key: Any
    """[B, 3] from which the LoRA dropout masks are made"""
    lr: Any
    """[] learning rate of this optimizer step; or, if the step has CLIP, [3]: the transformer's, CLIP's, and 1 if CLIP
    is trained in this step, else 0"""
    boundary: Any
    """[] true on the last micro-step of an accumulation window"""
    mask: Any = None
    """[B, 1, h, w] weight of the squared error at each latent; None without masks and concepts: then there is no such
    input"""
    concept: Any = None
    """[B, number of concepts] 1 where a row is of a concept, all 0 for class examples; None if there is but one"""

    @property
    def given(self) -> tuple[Any, ...]:
        """The inputs that there are, in order."""
        return tuple(column for column in self if column is not None)


class StepResult(NamedTuple):
    """On a boundary; elsewhere all zeros."""

    loss: float
    """Mean over the window and the ranks"""
    grad_norm: float
    """Before clipping"""
    applied: float
    """1 if the weights were changed; 0 if a gradient was Inf or NaN"""
    loss_scale: float
    stop_asked: float
    """Number of ranks that were asked to stop"""
