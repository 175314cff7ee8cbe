"""Conv2d on the CPU: MindSpore's kernel, or matrix products where that kernel is slow.

From 2.9 on MindSpore's oneDNN has no fast convolution for CPUs with AVX-512, and takes its reference kernel, which is
100 times slower; only a kernel of 1 x 1 is a product there too.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import mindspore as ms
from mindspore import ops

from flux_db import releases

_matmul, _reshape, _slice, _transpose, _add = ops.MatMul(), ops.Reshape(), ops.Slice(), ops.Transpose(), ops.Add()

STRIP_NUMBERS = 2**26
"""At most so many numbers are in memory besides input and output, for a picture: 256 MB. Larger ones are computed in
strips."""


# --- which form ----------------------------------------------------------------------------------------------------


def choose(version: str, machine: str, cpu_flags: str, variables: Mapping[str, str]) -> tuple[bool, str]:
    """Whether to compute by products, and the reason in words."""
    if releases.numbers(version) < (2, 9):
        return False, f"MindSpore {version}'s kernel"
    isa = variables.get("ONEDNN_MAX_CPU_ISA", variables.get("DNNL_MAX_CPU_ISA", ""))
    if machine == "x86_64" and "AVX" in isa.upper() and "AVX512" not in isa.upper():
        return False, f"MindSpore {version}'s kernel, because oneDNN is limited to {isa}"
    if machine == "x86_64" and "avx512f" not in cpu_flags.split():
        return False, f"MindSpore {version}'s kernel, because this CPU has no AVX-512"
    cpu = "CPUs with AVX-512" if machine == "x86_64" else f"{machine} was not tried"
    return True, f"matrix products, because MindSpore {version}'s kernel is slow ({cpu})"


def chosen() -> tuple[bool, str]:
    """For this machine and the installed MindSpore."""
    return choose(ms.__version__, platform.machine(), _cpu_flags(Path("/proc/cpuinfo")), os.environ)


def _cpu_flags(cpuinfo: Path) -> str:
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found else ""


# --- mint.nn.Conv2d ------------------------------------------------------------------------------------------------


def by_kernel(self, input):
    out = ops.conv2d(
        input,
        self.weight,
        stride=self.stride,
        pad_mode="pad",
        padding=self.padding,
        dilation=self.dilation,
        groups=self.groups,
    )
    return out if self.bias is None else ops.BiasAdd()(out, self.bias)


def by_products(self, input):
    if self.groups > 1 or self.kernel_size == (1, 1):
        return by_kernel(self, input)
    parts = ()
    for one in range(input.shape[0]):
        picture = input if input.shape[0] == 1 else _slice(input, (one, 0, 0, 0), (1, *input.shape[1:]))
        if self.stride == (1, 1) and self.dilation == (1, 1):
            parts += (_by_rows(picture, self.weight, self.padding),)
        else:
            parts += (_unfolded(picture, self.weight, self.padding, self.stride, self.dilation),)
    out = ops.Concat(0)(parts) if len(parts) > 1 else parts[0]
    return out if self.bias is None else ops.BiasAdd()(out, self.bias)


@ops.constexpr
def _strips(height, out_height, kernel, padding, numbers_of_row):
    """Of each strip: its first output row and how many, its first input row and how many, the rows of padding around
    these, and the row of what is padded where it begins."""
    most = max(1, STRIP_NUMBERS // numbers_of_row)
    found = ()
    for first in range(0, out_height, most):
        rows = min(most, out_height - first)
        top, bottom = max(0, first - padding), min(height, first - padding + rows + kernel - 1)
        around = padding if top == 0 or bottom == height else 0
        found += ((first, rows, top, bottom - top, around, first - padding - top + around),)
    return found


def _by_rows(x, weight, padding):
    """[1, C, H, W] -> [1, N, H', W'], of stride 1: one product for all rows of the kernel, whose results are added up,
    each shifted by its row. Only the columns of the kernel are unfolded: a third of the memory."""
    outputs, channels, down, across = weight.shape
    height, width = x.shape[2] + 2 * padding[0] - down + 1, x.shape[3] + 2 * padding[1] - across + 1
    unfolded = across * channels
    # [N, C, down, across] -> [down * N, C * across]
    matrix = _reshape(_transpose(weight, (2, 0, 1, 3)), (down * outputs, unfolded))
    numbers_of_row = (unfolded + down * outputs) * width
    strips = ()
    for _, rows, top, taken, around, begin in _strips(x.shape[2], height, down, padding[0], numbers_of_row):
        piece = x if taken == x.shape[2] else _slice(x, (0, 0, top, 0), (1, channels, taken, x.shape[3]))
        columns = ops.Im2Col(ksizes=(1, across), pads=(around, padding[1]))(piece)
        products = _matmul(matrix, _reshape(columns, (unfolded, (taken + 2 * around) * width)))
        out = _slice(products, (0, begin * width), (outputs, rows * width))
        for i in range(1, down):
            out = _add(out, _slice(products, (i * outputs, (begin + i) * width), (outputs, rows * width)))
        strips += (_reshape(out, (1, outputs, rows, width)),)
    return ops.Concat(2)(strips) if len(strips) > 1 else strips[0]


def _unfolded(x, weight, padding, stride, dilation):
    """[1, C, H, W] -> [1, N, H', W'], of any stride: the patches as columns of one matrix."""
    patches = ops.Im2Col(ksizes=weight.shape[2:], strides=stride, dilations=dilation, pads=padding)(x)
    height, width = (
        (x.shape[axis + 2] + 2 * padding[axis] - dilation[axis] * (weight.shape[axis + 2] - 1) - 1) // stride[axis] + 1
        for axis in (0, 1)
    )
    matrix = _reshape(weight, (weight.shape[0], -1))
    out = _matmul(matrix, _reshape(patches, (matrix.shape[1], height * width)))
    return _reshape(out, (1, weight.shape[0], height, width))


construct = by_products if chosen()[0] else by_kernel
