"""LoRAs of another rank, and several LoRAs as one: the nearest matrices of that rank, by singular values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flux_db.lora.convert import NOTE_OF_FUSED, NOTE_OF_PARTS, Layers, name_tensors
from flux_db.lora.lora_file import ADAPTER_METADATA, Layer
from flux_db.lora.merge import Additions
from flux_db.weight_file import to_bytes

# Metadata that is no longer true of other matrices.
OUTDATED = {ADAPTER_METADATA, NOTE_OF_PARTS, NOTE_OF_FUSED, "rank", "alpha", "ss_network_dim", "ss_network_alpha"}
OUTDATED |= {"text_encoder_rank"}


@dataclass(frozen=True)
class Resized:
    layers: Layers
    error: float
    """Distance from the exact weights, over all layers, relative to their size: 0 is exact, 1 is all lost."""

    @property
    def ranks(self) -> str:
        found = sorted({layer.rank for layer in self.layers.values()})
        return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


@dataclass(frozen=True)
class _Spectrum:
    """A layer's weight change as up @ diag(values) @ down, with orthonormal up and down."""

    up: np.ndarray
    values: np.ndarray
    """Descending."""
    down: np.ndarray
    dtype: np.dtype

    def rank_for(self, share: float) -> int:
        """The least rank that keeps this share of the sum of squares; at least 1."""
        squares = np.cumsum(self.values**2)
        if squares[-1] == 0:
            return 1
        return int(np.searchsorted(squares, share * squares[-1] * (1 - 1e-9))) + 1

    def cut(self, rank: int, *, mixed: bool) -> Layer:
        """Of alpha = rank, so that its strength is 1; the values are shared out evenly between both matrices."""
        rank = min(rank, len(self.values))
        root = np.sqrt(self.values[:rank])
        down, up = root[:, None] * self.down[:rank], self.up[:, :rank] * root
        # without alphas diffusers takes the rank of one layer for the alpha of all
        return Layer(down.astype(self.dtype), up.astype(self.dtype), float(rank), "F32" if mixed else None)


def resize(additions: Additions, *, rank: int | None = None, keep: float | None = None) -> Resized:
    """One LoRA for all that is added to each layer: of a rank, or as small as keeps a share of the sum of squares."""
    spectra = {name: _spectrum(layers) for name, layers in additions.items()}
    ranks = {name: rank or spectrum.rank_for(keep or 1.0) for name, spectrum in spectra.items()}
    # a layer may have fewer singular values than were asked for
    mixed = len({min(ranks[name], len(spectrum.values)) for name, spectrum in spectra.items()}) > 1
    layers = {name: spectrum.cut(ranks[name], mixed=mixed) for name, spectrum in spectra.items()}
    lost = sum(float((s.values[layers[name].rank :] ** 2).sum()) for name, s in spectra.items())
    total = sum(float((s.values**2).sum()) for s in spectra.values())
    return Resized(layers, math.sqrt(lost / total) if total else 0.0)


def _spectrum(layers: list[tuple[Layer, float]]) -> _Spectrum:
    """Never the whole weight: its factors are made orthogonal, and the small matrix between them is taken apart."""
    up = np.concatenate([layer.up.astype(np.float64) for layer, _ in layers], axis=1)
    scaled = [layer.down.astype(np.float64) * (layer.scale * strength) for layer, strength in layers]
    q_up, r_up = np.linalg.qr(up)
    q_down, r_down = np.linalg.qr(np.concatenate(scaled).T)
    left, values, right = np.linalg.svd(r_up @ r_down.T)
    count = len(values)
    return _Spectrum(q_up @ left[:, :count], values, (right[:count] @ q_down.T), layers[0][0].down.dtype)


def to_file(resized: Resized, metadata: Mapping[str, str], history: str) -> bytes:
    """A LoRA file with diffusers' keys; `history` says in the metadata where it comes from."""
    kept = {name: value for name, value in metadata.items() if name not in OUTDATED}
    tensors = name_tensors(resized.layers, "diffusers")
    return to_bytes(tensors, {**kept, "format": "pt", "rank": resized.ranks, "flux_db_made_by": history})
