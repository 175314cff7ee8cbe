"""The plan of a run's device memory as bars, one for each stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flux_db.check import device_memory
from flux_db.check.device_memory import Budget, Model
from flux_db.errors import UserError
from flux_db.report.page import escape
from flux_db.settings.schema import from_flat_dict

WIDTH, BAR, GAP, LEFT = 900, 28, 14, 130

# Of a name on the hub whose sizes are those that the program knows.
KNOWN = "FLUX.1"


def memory_chart(settings: Mapping[str, Any]) -> str:
    """Nothing if the settings make no sense, or the model is neither here nor known."""
    try:
        config = from_flat_dict(settings)
        model = device_memory.read_model(config)
        budget = device_memory.budget(config, model, 1)
    except (UserError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError):
        return ""
    return _figure(budget) if _is_known(model, config.model.pretrained_model_name_or_path) else ""


def _is_known(model: Model, name: str) -> bool:
    return model.is_here or KNOWN in name


def _figure(budget: Budget) -> str:
    scale = (WIDTH - LEFT - 80) / budget.peak
    names = list(dict.fromkeys(item.name for item in budget.items))
    parts = []
    for number, stage in enumerate(budget.stages):
        y, x = number * (BAR + GAP), float(LEFT)
        parts.append(f'<text x="{LEFT - 8}" y="{y + BAR * 0.7:.0f}" text-anchor="end">{escape(stage)}</text>')
        for item in budget.of(stage):
            width = item.bytes * scale
            hue = 360 * names.index(item.name) // len(names)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="hsl({hue} 55% 55%)">'
                f"<title>{escape(item.name)}: {item.bytes / 1e9:.2f} GB</title></rect>"
            )
            x += width
        total = f"{budget.total(stage) / 1e9:.1f} GB"
        parts.append(f'<text x="{x + 8:.1f}" y="{y + BAR * 0.7:.0f}">{total}</text>')
    height = len(budget.stages) * (BAR + GAP)
    words = "; ".join(f"{stage} {budget.total(stage) / 1e9:.1f} GB" for stage in budget.stages)
    note = "Of one device, computed from the settings and not measured. Point at a bar for its parts."
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(words)}">'
        f'{"".join(parts)}</svg></figure><p class="note">{note}</p>'
    )
