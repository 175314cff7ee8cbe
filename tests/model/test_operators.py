"""Every CPU replacement against float64 numpy, forward and gradient, compiled in graph mode.

Gradients are checked against central differences of the numpy function, so both sides share no code.
"""

import json
import math

import mindspore as ms
import numpy as np
import program
import pytest
from mindspore import Tensor, mint, nn, ops

from flux_db.errors import UserError
from flux_db.model import cpu_conv, formulations, operators
from flux_db.model.operators import Place

TOLERANCE = 3e-6
erf = np.vectorize(math.erf)


def normal(*shape, seed=0):
    return np.random.RandomState(seed + sum(shape)).randn(*shape)


def randomize(cell):
    """Parameters that no layer starts with, so that swapped, forgotten or doubled ones show; returns them by name."""
    values = {}
    for i, parameter in enumerate(cell.get_parameters()):
        value = 0.5 * normal(*parameter.shape, seed=100 + i) + (1.0 if "norm" in parameter.name else 0.0)
        parameter.set_data(Tensor(value, ms.float32))
        values[parameter.name] = parameter.asnumpy().astype(np.float64)
    return values


class Weighed(nn.Cell):
    """Outputs of a cell, and the gradients of their weighted sum for all inputs and parameters."""

    def __init__(self, net, weights):
        super().__init__(auto_prefix=False)
        self.net = net
        self.weights = tuple(Tensor(w, ms.float32) for w in weights)
        self.parameters = ms.ParameterTuple(net.trainable_params())
        self.by_input = ops.GradOperation(get_all=True)
        self.by_both = ops.GradOperation(get_all=True, get_by_list=True)

    def outputs(self, *inputs):
        out = self.net(*inputs)
        return out if isinstance(out, tuple) else (out,)

    def total(self, *inputs):
        outputs, total = self.outputs(*inputs), 0.0
        for i in range(len(self.weights)):
            total = total + (outputs[i] * self.weights[i]).sum()
        return total

    def construct(self, *inputs):
        if len(self.parameters) > 0:
            by_input, by_parameter = self.by_both(self.total, self.parameters)(*inputs)
            return self.outputs(*inputs), by_input, by_parameter
        return self.outputs(*inputs), self.by_input(self.total)(*inputs), ()


def central_differences(function, values, h=1e-5):
    """Gradient of a scalar function of a list of float64 arrays."""
    gradients = []
    for value in values:
        gradient = np.zeros_like(value)
        for i in np.ndindex(value.shape):
            kept = value[i]
            value[i] = kept + h
            above = function()
            value[i] = kept - h
            gradient[i] = (above - function()) / (2 * h)
            value[i] = kept
        gradients.append(gradient)
    return gradients


def assert_close(got, wanted, what, tolerance=TOLERANCE):
    got = got.asnumpy() if isinstance(got, Tensor) else got
    wanted = np.asarray(wanted)
    assert got.shape == wanted.shape, what
    assert np.abs(got - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max()), what


def check(net, reference, *inputs, tolerance=TOLERANCE):
    """The cell computes what `reference(parameters by name, *inputs)` does in numpy, and its gradient is the slope."""
    parameters = randomize(net)
    inputs = [np.asarray(x, np.float32).astype(np.float64) for x in inputs]

    def outputs():
        out = reference(parameters, *inputs)
        return out if isinstance(out, tuple) else (out,)

    wanted = outputs()
    weights = [normal(*out.shape, seed=7 + i).astype(np.float32).astype(np.float64) for i, out in enumerate(wanted)]
    tensors = [Tensor(x, ms.float32) for x in inputs]
    out, by_input, by_parameter = Weighed(net, weights)(*tensors)
    assert len(out) == len(wanted)
    for i, pair in enumerate(zip(out, wanted, strict=True)):
        assert_close(*pair, f"output {i}", tolerance)

    names = [p.name for p in net.trainable_params()]
    values = [*inputs, *(parameters[name] for name in names)]
    slopes = central_differences(
        lambda: sum((out * weight).sum() for out, weight in zip(outputs(), weights, strict=True)), values
    )
    labels = [*(f"input {i}" for i in range(len(inputs))), *names]
    for label, got, slope in zip(labels, (*by_input, *by_parameter), slopes, strict=True):
        assert np.abs(slope).max() > 1e-3, f"the check of {label} is empty"
        assert_close(got, slope, f"gradient of {label}", tolerance)


class Of(nn.Cell):
    """A plain function as a cell."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


# --- numpy references --------------------------------------------------------------------------------------------


def np_normalize(x, axes, eps):
    centred = x - x.mean(axes, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axes, keepdims=True) + eps)


def np_group_norm(x, groups, weight, bias, eps):
    out = np.empty_like(x)
    size = x.shape[1] // groups
    for g in range(groups):
        channels = slice(g * size, (g + 1) * size)
        out[:, channels] = np_normalize(x[:, channels], tuple(range(1, x.ndim)), eps)
    channelwise = (-1,) + (1,) * (x.ndim - 2)
    return out * weight.reshape(channelwise) + bias.reshape(channelwise)


def np_gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def np_gelu(x):
    return x * 0.5 * (1 + erf(x / math.sqrt(2)))


def np_linear(p, name, x):
    out = x @ p[f"{name}weight"].T
    return out + p[f"{name}bias"] if f"{name}bias" in p else out


def np_conv(x, weight, bias, stride, padding, dilation=(1, 1), groups=1):
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    b, _, h, w = x.shape
    n, per_group, kh, kw = weight.shape
    out_h = (h - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    out_w = (w - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    out = np.zeros((b, n, out_h, out_w))
    for o in range(n):
        first = o // (n // groups) * per_group
        for i, j in np.ndindex(kh, kw):
            rows = slice(i * dilation[0], i * dilation[0] + out_h * stride[0], stride[0])
            columns = slice(j * dilation[1], j * dilation[1] + out_w * stride[1], stride[1])
            patch = x[:, first : first + per_group, rows, columns]
            out[:, o] += np.einsum("bchw,c->bhw", patch, weight[o, :, i, j])
    return out if bias is None else out + bias.reshape(1, -1, 1, 1)


def np_rms(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def np_silu(x):
    return x / (1 + np.exp(-x))


def np_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_angles(ids, axes_dim, theta):
    """[S, D/2] angle of each channel pair, straight from the definition."""
    columns = []
    for axis, dim in enumerate(axes_dim):
        columns += [ids[:, axis] / theta ** (2 * pair / dim) for pair in range(dim // 2)]
    return np.stack(columns, -1)


def np_rotate(x, angles):
    """[B, S, H, D]: channel pairs as complex numbers, turned by their angle."""
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def np_attention(q, k, v, scale):
    """[B, S, H, D] -> [B, S, H*D]"""
    weights = np_softmax(np.einsum("bqhd,bkhd->bhqk", q, k) * scale)
    return np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(q.shape[0], q.shape[1], -1)


# --- functions of mindspore.mint ---------------------------------------------------------------------------------


class Makers(nn.Cell):
    def construct(self, two_and_a_half):
        return (
            mint.arange(5),
            mint.arange(end=3),
            mint.arange(7, 1, -2),
            mint.arange(0, 3, 1.25),
            mint.arange(0, 6, 2, dtype=ms.float16),
            mint.full((2, 3), 4),
            mint.full([2], 0.5),
            mint.full((2,), True),
            mint.full((1, 2), 3, dtype=ms.float32),
            mint.full((2,), two_and_a_half),
            mint.zeros(3),
            mint.zeros([2, 1], dtype=ms.int32),
            mint.ones((2, 2)),
            mint.ones(2, dtype=ms.bool_),
            mint.linspace(3, 10, 5),
            mint.linspace(-1.0, 1.0, 1),
            mint.linspace(0, 1, 5, dtype=ms.float16),
            mint.linspace(0, 8, 5, dtype=ms.int64),
        )


MADE = [
    np.arange(5),
    np.arange(3),
    np.array([7, 5, 3]),
    np.array([0, 1.25, 2.5], np.float32),
    np.array([0, 2, 4], np.float16),
    np.full((2, 3), 4),
    np.full((2,), 0.5, np.float32),
    np.array([True, True]),
    np.full((1, 2), 3, np.float32),
    np.full((2,), 2.5, np.float32),
    np.zeros(3, np.float32),
    np.zeros((2, 1), np.int32),
    np.ones((2, 2), np.float32),
    np.array([True, True]),
    np.array([3, 4.75, 6.5, 8.25, 10], np.float32),
    np.array([-1], np.float32),
    np.array([0, 0.25, 0.5, 0.75, 1], np.float16),
    np.array([0, 2, 4, 6, 8]),
]


@pytest.mark.parametrize("compiled", [True, False])
def test_makers_have_the_values_and_types_of_mint(compiled):
    cell = Makers()
    out = cell(Tensor(2.5)) if compiled else cell.construct(Tensor(2.5))
    for i, (got, wanted) in enumerate(zip(out, MADE, strict=True)):
        assert got.asnumpy().dtype == wanted.dtype, i
        np.testing.assert_array_equal(got.asnumpy(), wanted, err_msg=str(i))


class Shapers(nn.Cell):
    def construct(self, x, v):
        return (
            *mint.split(x, 2),
            *mint.split(x, (1, 3), dim=1),
            *mint.split(x, [3, 1], dim=-1),
            *mint.chunk(x, 2),
            *mint.chunk(x, 3, dim=-1),
            mint.stack([x, x * 2.0]),
            mint.stack((x, x * 3.0), dim=-1),
            mint.outer(v, v + 1.0),
        )


def test_split_chunk_stack_outer():
    def reference(_, x, v):
        return (
            *(x[:2], x[2:]),
            *(x[:, :1], x[:, 1:]),
            *(x[:, :3], x[:, 3:]),
            *(x[:2], x[2:]),
            *(x[:, :2], x[:, 2:]),  # 4 columns in chunks of ceil(4 / 3)
            np.stack([x, x * 2]),
            np.stack([x, x * 3], -1),
            np.outer(v, v + 1),
        )

    check(Shapers(), reference, normal(3, 4), normal(3))


class Norms(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layer = mint.nn.LayerNorm((3, 4), eps=1e-3)
        self.gain_only = mint.nn.LayerNorm(4, bias=False)
        self.plain = mint.nn.LayerNorm(4, eps=1e-6, elementwise_affine=False)
        self.group = mint.nn.GroupNorm(2, 6, eps=1e-3)

    def construct(self, x, picture, gain, shift):
        functional = mint.nn.functional
        return (
            self.layer(x),
            self.gain_only(x),
            self.plain(x),
            functional.layer_norm(x, 4, gain, shift),
            functional.layer_norm(x, [3, 4], eps=0.1),
            self.group(picture),
            functional.group_norm(picture, 3),
            functional.group_norm(picture.reshape(2, 6, 4), 1, eps=0.1),
        )


def test_layer_norm_and_group_norm():
    def reference(p, x, picture, gain, shift):
        one, zero = np.ones(6), np.zeros(6)
        return (
            np_normalize(x, (-2, -1), 1e-3) * p["layer.weight"] + p["layer.bias"],
            np_normalize(x, -1, 1e-5) * p["gain_only.weight"],
            np_normalize(x, -1, 1e-6),
            np_normalize(x, -1, 1e-5) * gain + shift,
            np_normalize(x, (-2, -1), 0.1),
            np_group_norm(picture, 2, p["group.weight"], p["group.bias"], 1e-3),
            np_group_norm(picture, 3, one, zero, 1e-5),
            np_group_norm(picture.reshape(2, 6, 4), 1, one, zero, 0.1),
        )

    check(Norms(), reference, normal(2, 3, 4) + 0.3, normal(2, 6, 2, 2) * 2, normal(4), normal(4, seed=1))


class Gelus(nn.Cell):
    def construct(self, x):
        return mint.nn.functional.gelu(x), mint.nn.functional.gelu(x, approximate="tanh")


def test_gelu():
    x = np.concatenate([normal(3, 5).ravel(), [0.0, -3.0, -2.0, 2.0, 3.0]])
    check(Gelus(), lambda _, x: (np_gelu(x), np_gelu_tanh(x)), x)


# --- layers ------------------------------------------------------------------------------------------------------


class Linears(nn.Cell):
    def __init__(self):
        super().__init__()
        self.biased, self.bare = mint.nn.Linear(4, 3), mint.nn.Linear(3, 5, bias=False)

    def construct(self, x, vector):
        return self.bare(self.biased(x)), self.biased(vector)


def test_linear():
    def reference(p, x, vector):
        return np_linear(p, "bare.", np_linear(p, "biased.", x)), np_linear(p, "biased.", vector)

    check(Linears(), reference, normal(2, 3, 4), normal(4))


class Convolutions(nn.Cell):
    def __init__(self):
        super().__init__()
        self.same = mint.nn.Conv2d(4, 2, 3, padding=1)
        self.down = mint.nn.Conv2d(4, 2, 3, stride=2, bias=False)
        self.odd = mint.nn.Conv2d(4, 2, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=2)

    def construct(self, x):
        return self.same(x), self.down(x), self.odd(x)


def test_conv2d():
    def reference(p, x):
        return (
            np_conv(x, p["same.weight"], p["same.bias"], (1, 1), (1, 1)),
            np_conv(x, p["down.weight"], None, (2, 2), (0, 0)),
            np_conv(x, p["odd.weight"], p["odd.bias"], (1, 2), (2, 1), (2, 1), groups=2),
        )

    check(Convolutions(), reference, normal(2, 4, 5, 6))


class Convolution(nn.Cell):
    def __init__(self, layer, form):
        super().__init__()
        self.layer, self.form = layer, form

    def construct(self, x):
        return self.form(self.layer, x)


@pytest.mark.parametrize("strip", [2**26, 300])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 0), (1, 1, 0), ((3, 1), 1, (1, 0)), (5, 1, 1), ((2, 3), 1, 0)]
)
def test_a_convolution_by_products_is_the_kernels(monkeypatch, kernel, stride, padding, strip):
    """In one piece, and in strips of a few rows."""
    monkeypatch.setattr(cpu_conv, "STRIP_NUMBERS", strip)
    layer = mint.nn.Conv2d(4, 6, kernel, stride=stride, padding=padding)
    randomize(layer)
    x = Tensor(normal(2, 4, 11, 9), ms.float32)
    found, wanted = (Convolution(layer, form)(x).asnumpy() for form in (cpu_conv.by_products, cpu_conv.by_kernel))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("version", "machine", "flags", "variables", "by_products"),
    [
        ("2.7.1", "x86_64", "fpu avx512f", {}, False),
        ("2.8.0", "x86_64", "fpu avx512f", {}, False),
        ("2.9.0", "x86_64", "fpu avx512f", {}, True),
        ("2.10.0", "x86_64", "fpu avx2", {}, False),
        ("2.10.0", "x86_64", "fpu avx512f", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ("2.10.0", "x86_64", "fpu avx512f", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, True),
        ("2.10.0", "aarch64", "", {}, True),
        ("2.7.1", "aarch64", "", {}, False),
    ],
)
def test_the_form_of_convolutions_follows_from_version_and_cpu(version, machine, flags, variables, by_products):
    found, reason = cpu_conv.choose(version, machine, flags, variables)
    assert found == by_products and version in reason and ("products" in reason) == by_products


class RmsNorms(nn.Cell):
    def __init__(self):
        super().__init__()
        from mindone.diffusers.models.normalization import RMSNorm

        self.gain = RMSNorm(4, eps=1e-2)
        self.gain_and_bias = RMSNorm(4, eps=1e-6, bias=True)
        self.plain = RMSNorm(4, eps=1e-6, elementwise_affine=False)

    def construct(self, x):
        return self.gain(x), self.gain_and_bias(x), self.plain(x)


def test_rms_norm():
    def reference(p, x):
        return (
            np_rms(x, p["gain.weight"], 1e-2),
            np_rms(x, p["gain_and_bias.weight"], 1e-6) + p["gain_and_bias.bias"],
            np_rms(x, 1.0, 1e-6),
        )

    check(RmsNorms(), reference, normal(2, 3, 2, 4))


class OwnEmbedding(nn.Cell):
    def construct(self, timestep, class_labels, hidden_dtype=None):
        return timestep * class_labels


class AdaNorms(nn.Cell):
    def __init__(self):
        super().__init__()
        from mindone.diffusers.models.normalization import AdaLayerNormZero, AdaLayerNormZeroSingle

        self.zero, self.single, self.embedding = AdaLayerNormZero(4), AdaLayerNormZeroSingle(4), AdaLayerNormZero(4)
        self.embedding.emb = OwnEmbedding()

    def construct(self, x, emb):
        return *self.zero(x, emb=emb), *self.single(x, emb=emb), *self.embedding(x, emb, emb + 1.0)


def test_ada_norms():
    def modulated(x, linear, parts):
        shift, scale, gate, *rest = np.split(linear, parts, -1)
        return np_normalize(x, -1, 1e-6) * (1 + scale[:, None]) + shift[:, None], gate, *rest

    def reference(p, x, emb):
        return (
            *modulated(x, np_linear(p, "zero.linear.", np_silu(emb)), 6),
            *modulated(x, np_linear(p, "single.linear.", np_silu(emb)), 3),
            *modulated(x, np_linear(p, "embedding.linear.", np_silu(emb * (emb + 1))), 6),
        )

    check(AdaNorms(), reference, normal(2, 3, 4), normal(2, 4))


# --- positions and attention -------------------------------------------------------------------------------------

AXES, THETA = (2, 4, 2), 10000
IDS = np.array([[0, 0, 0], [0, 0, 1], [0, 63, 2], [1, 5, 127], [3, 2, 2]], np.float64)


def test_position_embedding_is_its_definition():
    from mindone.diffusers.models.transformers.transformer_flux import FluxPosEmbed

    cos, sin = FluxPosEmbed(THETA, AXES)(Tensor(IDS, ms.float32))
    angles = np.repeat(np_angles(IDS, AXES, THETA), 2, axis=-1)
    assert_close(cos, np.cos(angles), "cos")
    assert_close(sin, np.sin(angles), "sin")


class Joint(nn.Cell):
    """Attention of a double block (with text) or a single block (without), positions included."""

    def __init__(self, rotary=True, **options):
        super().__init__()
        from mindone.diffusers.models.transformers.transformer_flux import FluxAttention, FluxPosEmbed

        self.attention = FluxAttention(query_dim=8, heads=1, dim_head=8, out_dim=8, bias=True, eps=1e-6, **options)
        self.embed = FluxPosEmbed(THETA, AXES)
        self.ids = Tensor(IDS, ms.float32)
        self.rotary = rotary

    def construct(self, image, text=None):
        rotary = self.embed(self.ids) if self.rotary else None
        return self.attention(image, encoder_hidden_states=text, image_rotary_emb=rotary)


def np_heads(p, name, x, heads=1):
    return np_linear(p, f"attention.{name}.", x).reshape(*x.shape[:2], heads, -1)


def test_double_block_attention():
    def reference(p, image, text):
        def part(x, names, norms):
            q, k, v = (np_heads(p, name, x) for name in names)
            q, k = (np_rms(y, p[f"attention.{n}.weight"], 1e-6) for y, n in zip((q, k), norms, strict=True))
            return q, k, v

        of_text = part(text, ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k"))
        of_image = part(image, ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
        q, k, v = (np.concatenate(pair, 1) for pair in zip(of_text, of_image, strict=True))
        angles = np_angles(IDS, AXES, THETA)
        out = np_attention(np_rotate(q, angles), np_rotate(k, angles), v, 8**-0.5)
        return np_linear(p, "attention.to_out.0.", out[:, 2:]), np_linear(p, "attention.to_add_out.", out[:, :2])

    inputs = normal(1, 3, 8), normal(1, 2, 6)
    check(Joint(added_kv_proj_dim=6, context_pre_only=False), reference, *inputs, tolerance=1e-5)


def single_block_reference(angles):
    def reference(p, x):
        q, k, v = (np_heads(p, name, x) for name in ("to_q", "to_k", "to_v"))
        q, k = (np_rms(y, p[f"attention.{n}.weight"], 1e-6) for y, n in ((q, "norm_q"), (k, "norm_k")))
        return np_attention(np_rotate(q, angles), np_rotate(k, angles), v, 8**-0.5)

    return reference


@pytest.mark.parametrize("rotary", [True, False])
def test_single_block_attention(rotary):
    angles = np_angles(IDS * rotary, AXES, THETA)
    check(Joint(rotary, pre_only=True), single_block_reference(angles), normal(2, 5, 8), tolerance=1e-5)


def test_rotation_of_several_heads():
    angles = np_angles(IDS, AXES, THETA)
    tables = [Tensor(np.repeat(f(angles), 2, -1), ms.float32) for f in (np.cos, np.sin)]

    def rotate(x):
        return formulations.rotate(x, *tables)

    check(Of(rotate), lambda _, x: np_rotate(x, angles), normal(2, 5, 3, 8))


class VaeAttention(nn.Cell):
    def __init__(self):
        super().__init__()
        from mindone.diffusers.models.attention_processor import Attention

        self.attention = Attention(query_dim=4, heads=2, dim_head=2)
        for parameter in self.attention.get_parameters():
            parameter.requires_grad = False

    def construct(self, q, k, v):
        call = self.attention.scaled_dot_product_attention
        return call(q, k, v), call(q, k, v, dropout_p=0.0, is_causal=False, scale=0.3)


def test_scaled_dot_product_attention():
    def reference(_, q, k, v):
        def attend(scale):
            return np_softmax(np.einsum("bhqd,bhkd->bhqk", q, k) * scale) @ v

        return attend(6**-0.5), attend(0.3)

    check(VaeAttention(), reference, normal(2, 2, 3, 6), normal(2, 2, 4, 6), normal(2, 2, 4, 6, seed=1))


def test_a_mask_is_refused_and_not_ignored():
    x = Tensor(normal(1, 1, 3, 2), ms.float32)
    with pytest.raises(ValueError, match="no mask"):
        formulations.vae_attention(None, x, x, x, attn_mask=x)
    with pytest.raises(ValueError, match="no mask"):
        formulations.flux_attention_construct(None, x, attention_mask=x)


@pytest.mark.parametrize("flip", [True, False])
def test_timestep_embedding_is_its_definition(flip):
    """At 3500, which guidance 3.5 becomes, an error in a frequency shows 3500 times as large."""
    from mindone.diffusers.models.embeddings import Timesteps

    times = np.array([0.0, 1.0, 17.0, 997.0, 3500.0])
    angles = times[:, None] * 10000.0 ** -(np.arange(128) / 128)
    parts = (np.cos(angles), np.sin(angles)) if flip else (np.sin(angles), np.cos(angles))
    cell = Timesteps(256, flip_sin_to_cos=flip, downscale_freq_shift=0)
    error = np.abs(cell(Tensor(times, ms.float32)).asnumpy() - np.concatenate(parts, axis=1)).max(axis=1)
    assert (error <= 1e-6 + 1e-7 * times).all(), error


# --- T5 ----------------------------------------------------------------------------------------------------------


def test_t5_relative_buckets():
    # Distances at which a new bucket begins, both ways, from transformers 4.57.1 on torch 2.13.0 for +-511
    starts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    wanted = np.searchsorted(starts, np.arange(512), side="right") - 1
    table = formulations.relative_buckets(512, 512, 32, 128)
    np.testing.assert_array_equal(table[511, ::-1], wanted)  # keys before the query
    np.testing.assert_array_equal(table[0, 1:], wanted[1:] + 16)  # keys after it
    assert all((np.diag(table, k) == table[max(-k, 0), max(k, 0)]).all() for k in range(-511, 512))


# --- float16 -----------------------------------------------------------------------------------------------------


class Half(nn.Cell):
    def __init__(self):
        super().__init__()
        from mindone.diffusers.models.normalization import RMSNorm

        self.layer = mint.nn.LayerNorm(8)
        self.rms = RMSNorm(8, eps=1e-6)
        self.joint = Joint(pre_only=True)

    def construct(self, x):
        functional = mint.nn.functional
        gelus = functional.gelu(x), functional.gelu(x, approximate="tanh")
        return self.layer(x), self.rms(x), *gelus, self.joint(x)


def test_float16_is_close_to_float32():
    net = Half()
    p = randomize(net)
    for parameter in net.get_parameters():
        parameter.set_dtype(ms.float16)
    x = (normal(1, 5, 8) * 3).astype(np.float16)
    big = np.array([[-6e4, -300, -20, 20, 300, 6e4]], np.float16)
    joint = {name.removeprefix("joint."): value for name, value in p.items()}
    x64 = x.astype(np.float64)
    wanted = (
        np_normalize(x64, -1, 1e-5) * p["layer.weight"] + p["layer.bias"],
        np_rms(x64, p["rms.weight"], 1e-6),
        np_gelu(x64),
        np_gelu_tanh(x64),
        single_block_reference(np_angles(IDS, AXES, THETA))(joint, x64),
    )
    weights = [np.ones_like(out) for out in wanted]
    out, (gradient,), by_parameter = Weighed(net, weights)(Tensor(x))
    for i, (got, reference) in enumerate(zip(out, wanted, strict=True)):
        assert got.dtype == ms.float16, i
        assert_close(got, reference, i, tolerance=1e-2)
    assert all(np.isfinite(g.asnumpy()).all() for g in (gradient, *by_parameter))

    (plain, tanh), (slope,), _ = Weighed(Gelus(), [np.ones((1, 6))] * 2)(Tensor(big))
    for got in (plain, tanh):
        assert_close(got, np.maximum(big, 0).astype(np.float64), "large gelu", tolerance=3e-3)
    assert_close(slope, 2.0 * (big > 0), "slope of large gelu", tolerance=1e-3)


# --- the VAE's attention in parts ---------------------------------------------------------------------------------


class InParts(nn.Cell):
    def construct(self, q, k, v):
        return formulations.vae_attention(self, q, k, v)


def test_the_vaes_attention_in_parts_is_the_whole(monkeypatch):
    q, k, v = (Tensor(normal(1, 1, 8, 4, seed=seed), ms.float32) for seed in range(3))
    whole = InParts()(q, k, v).asnumpy()
    monkeypatch.setattr(formulations, "VAE_QUERIES", 2)
    np.testing.assert_allclose(InParts()(q, k, v).asnumpy(), whole, rtol=1e-6)


# --- installing --------------------------------------------------------------------------------------------------

INSTALL = """
import json
from mindspore import mint
import mindspore.mint.nn.functional as functional

def contents():
    return {f"{o.__name__}.{n}": id(v) for o in (mint, functional) for n, v in vars(o).items() if callable(v)}

before = contents()
from flux_db.model import lazy_mindone, operators
lazy_mindone.install()
assert contents() == before, "importing replaces nothing"
places = {device: operators.places(device) for device in ("CPU", "Ascend")}
found = {}
for device in ("CPU", "Ascend", "CPU"):
    operators.install(device)
    for place in places[device]:
        assert getattr(place.find(), place.name) is place.replacement, (device, place)
        found[f"{device} {place.owner}.{place.name}"] = place.replacement.__name__
    if device == "Ascend":
        assert contents() == before, "on Ascend mint's functions are its own"
print(json.dumps(found))
"""


def test_install_puts_everything_in_place_for_either_device():
    done = program.run([program.PYTHON, "-c", INSTALL])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    on_cpu = {name.removeprefix("CPU "): what for name, what in found.items() if name.startswith("CPU ")}
    on_ascend = {name.removeprefix("Ascend "): what for name, what in found.items() if name.startswith("Ascend ")}
    different = {name for name in on_cpu.keys() & on_ascend.keys() if on_cpu[name] != on_ascend[name]}
    assert {name.rpartition(":")[2] for name in different} == {
        "FluxAttention.attend",
        "FluxAttention.queries_and_keys",
        "FluxAttention.split_tokens",
        "FluxTransformer2DModel.split_tokens",
        "RMSNorm.construct",
        "FluxTransformerBlock.activate",
        "FluxSingleTransformerBlock.activate",
    }
    assert on_ascend.keys() <= on_cpu.keys()
    more = {name for name in on_cpu.keys() - on_ascend.keys() if not name.startswith("mindspore.mint")}
    layers = ("repeated", "as_argument", "add_bias", "layer_norm", "modulated_norm", "gatherable")
    assert more == {f"flux_db.model.formulations.{name}" for name in layers}


def other_arguments(self, x, more):
    return x


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (Place("mindone.diffusers.no_such_module:Flux", "construct", other_arguments), "is not there"),
        (Place("mindspore.mint.nn:NoSuchCell", "construct", other_arguments), "is not there"),
        (Place("mindspore.mint.nn:Linear", "no_such_method", other_arguments), "has no 'no_such_method'"),
        (Place("mindspore.mint.nn:Tanh", "construct", other_arguments), "takes (self, input), not (self, x, more)"),
        (Place("mindspore.mint.nn:Linear", "construct", other_arguments, is_new=True), "has a method 'construct'"),
    ],
)
def test_a_place_that_has_moved_is_refused_with_both_versions(place, problem):
    with pytest.raises(UserError) as caught:
        operators._put(place)
    (message,) = caught.value.problems
    assert problem in str(message) and f"mindspore {ms.__version__}, mindone 0.5.0" in str(message)
