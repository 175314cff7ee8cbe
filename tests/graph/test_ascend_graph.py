"""The graphs that an Ascend device would run, read without one: what is in them, what they keep, what they send."""

import re
from pathlib import Path

import mindspore
import program
import pytest

from flux_db.data.encode import CLIP_TOKENS
from flux_db.graph import ir
from flux_db.graph.ascend_graph import CLIP_LAYERS, DEVICES, EVERYTHING, GRAPHS, LEVERS, SMALL_WIDTHS, WITH_CLIP, Case

TENSORS = {"double": 24, "single": 6}
"""Of the LoRA in the default layers of a block."""
INT8 = ("int8, nothing recomputed", "int8, sharded")
STEPS = ("step", "everything", "fp16, attention", "sharded", "levers", *INT8)
MATRICES = 14 + 6
"""Of one double and one single block: with their modulations, attention and feed-forward."""
CASES = {"everything": EVERYTHING, "levers": LEVERS}

# Operator -> the name of its kernel in MindSpore's library for Ascend.
ACLNN = {
    "Abs": "Abs",
    "Add": "Add",
    "Argmax": "ArgMax",
    "BatchMatMul": "BatchMatMul",
    "BroadcastTo": "Expand",
    "Cast": "Cast",
    "ClampScalar": "Clamp",
    "Concat": "Cat",
    "ConstantPadND": "ConstantPadNd",
    "Conv2DExt": "Convolution",
    "Cos": "Cos",
    "Dense": "Matmul",
    "Div": "Div",
    "Divs": "Divs",
    "Embedding": "Embedding",
    "EqScalar": "EqScalar",
    "Equal": "Equal",
    "Exp": "Exp",
    "FlashAttentionScore": "FlashAttentionScore",
    "FlashAttentionScoreGrad": "FlashAttentionScoreGrad",
    "Floor": "Floor",
    "Gather": "Gather",
    "GeLU": "Gelu",
    "GeLUGrad": "GeluBackward",
    "Greater": "GtTensor",
    "GroupNorm": "GroupNorm",
    "InplaceAddExt": "InplaceAdd",
    "IsFinite": "IsFinite",
    "LayerNorm": "LayerNorm",
    "LayerNormGrad": "LayerNormBackward",
    "Less": "LtTensor",
    "LessScalar": "LtScalar",
    "LogicalAnd": "LogicalAnd",
    "MaskedFill": "InplaceMaskedFillTensor",
    "MatMul": "Matmul",
    "MatMulExt": "Matmul",
    "Maximum": "Maximum",
    "Minimum": "Minimum",
    "Mul": "Mul",
    "Muls": "Muls",
    "Neg": "Neg",
    "PowTensorScalar": "PowTensorScalar",
    "Reciprocal": "Reciprocal",
    "ReduceMean": "Mean",
    "ReduceSum": "ReduceSum",
    "RemainderTensorScalar": "RemainderTensorScalar",
    "RmsNorm": "RmsNorm",
    "RmsNormGrad": "RmsNormGrad",
    "Rsqrt": "Rsqrt",
    "Select": "SWhere",
    "Sigmoid": "Sigmoid",
    "SigmoidGrad": "SigmoidBackward",
    "Sin": "Sin",
    "Slice": "Slice",
    "Softmax": "Softmax",
    "SoftmaxBackward": "SoftmaxBackward",
    "Split": "SplitTensor",
    "SplitWithSize": "SplitWithSize",
    "Sqrt": "Sqrt",
    "Stack": "Stack",
    "Sub": "Sub",
    "SubScalar": "Subs",
    "SumExt": "ReduceSum",
    "Tanh": "Tanh",
    "Tile": "Repeat",
    "Transpose": "Permute",
    "UpsampleNearest2D": "UpsampleNearest2d",
}
# Kernels of the older interface, which AI Core has as well.
ACLOP = {"AddN", "BiasAdd", "FillV2", "GatherNd", "Pow", "RealDiv", "StridedSlice", "StridedSliceGrad"}
# Copies, views, control flow and collectives: no kernels of AI Core or AICPU.
OTHER = {"AllGather", "AllReduce", "Assign", "Contiguous", "ExpandDims", "Identity", "Partial", "Switch", "TensorMove"}


def blocks(name: str) -> int:
    return 4 if name == "step" else 2


def trained(name: str) -> int:
    return blocks(name) // 2 * (TENSORS["double"] + TENSORS["single"])


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> dict[str, ir.Graph]:
    folder = tmp_path_factory.mktemp("graphs")
    words = [program.PYTHON, "-m", "flux_db.graph.ascend_graph", str(folder), *GRAPHS]
    done = program.run(words, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.stem: ir.parse(path.read_text(encoding="utf-8")) for path in folder.iterdir()}


def blocks_of(nodes) -> set[str]:
    found = (re.search(r"(single_transformer|transformer)_blocks-CellList/\d+", node.scope) for node in nodes)
    return {match[0] for match in found if match}


@pytest.mark.parametrize("name", GRAPHS)
def test_every_operator_has_a_kernel_on_ais_cores_and_none_runs_python(graphs, name):
    found = set(graphs[name].counts()) - ir.STRUCTURE
    assert len(found) > 10
    assert found <= ACLNN.keys() | ACLOP | OTHER, "look up what runs it on Ascend before adding it to the table"
    assert all(node.bytes <= 4 for node in graphs[name].of("TensorMove")), "nothing but numbers is copied"


def test_the_kernels_are_in_mindspores_library_for_ascend(graphs):
    """Those that this version of MindSpore uses: newer ones have some that older ones lack."""
    library = Path(mindspore.__file__).parent / "lib" / "plugin" / "libmindspore_ops_ascend.so"
    if not library.exists():
        pytest.skip("this build of MindSpore has no library for Ascend")
    content = library.read_bytes()
    used = {operator for graph in graphs.values() for operator in graph.counts()}
    assert [op for op in sorted(used & ACLNN.keys()) if f"aclnn{ACLNN[op]}\0".encode() not in content] == []


@pytest.mark.parametrize("name", [*STEPS, "sampler", "validation loss"])
def test_products_are_in_half_precision_but_for_the_rotary_angles(graphs, name):
    products = [n for op in ("MatMul", "Dense", "FlashAttentionScore") for n in graphs[name].of(op)]
    in_full = [node.scope for node in products if any(kind.dtype == "Float32" for kind in node.outputs)]
    assert len(products) > 30 and len(in_full) == 1 and "FluxPosEmbed" in in_full[0]


@pytest.mark.parametrize("name", ["T5", "CLIP"])
def test_text_encoders_compute_in_half_precision(graphs, name):
    products = [n for op in ("MatMul", "MatMulExt", "BatchMatMul") for n in graphs[name].of(op)]
    assert products and all(kind.dtype == "BFloat16" for node in products for kind in node.outputs)


@pytest.mark.parametrize("name", ["step", "everything", "sharded", "int8, sharded"])
def test_every_block_is_recomputed_whole_and_only_its_inputs_are_kept(graphs, name):
    graph = graphs[name]
    assert graph.counts()["FlashAttentionScore"] == 2 * blocks(name)
    assert graph.counts()["FlashAttentionScoreGrad"] == blocks(name)
    repeated = [node for node in graph if node.is_repeated]
    assert len(blocks_of(repeated)) == blocks(name)
    case = EVERYTHING if name == "everything" else Case()
    rows, width, image_tokens = case.rows, 32, case.image_tokens
    tokens = case.tokens + image_tokens
    inputs = blocks(name) * rows * tokens * width * 2  # text and image in bf16
    end = rows * tokens * width * 2  # the last block's result
    loss = rows * image_tokens * 64 * 4
    rotary = 2 * tokens * 16 * 4
    kept = [node for node in graph.kept() if node.op != "AllGather"]
    assert sum(node.bytes for node in kept) == pytest.approx(inputs + end + loss + rotary, rel=0.15)
    # recomputed block by block: what a block repeats is read from that block or from what is kept
    assert len({re.search(r"recompute_sub_graph: U64\((\d+)\)", n.attributes)[1] for n in repeated}) == blocks(name)


@pytest.mark.parametrize("name", ["step", "everything", "sharded", "int8, sharded"])
def test_what_is_recomputed_waits_for_the_gradient(graphs, name):
    """Otherwise a device may compute it again at once, in the forward, and keep it all until the backward."""
    waits: dict[str, bool] = {}
    for node in graphs[name]:
        begins = "Gradients" in node.scope and not node.is_repeated
        waits[node.name] = begins or any(waits.get(above, False) for above in node.inputs)
    repeated = [node for node in graphs[name] if node.is_repeated]
    assert repeated and all(waits[node.name] for node in repeated)


@pytest.mark.parametrize("name", ["sharded", *INT8])
def test_no_matrix_is_made_whole_or_gathered_before_its_block_is_reached(graphs, name):
    """Breadth first, a device would otherwise begin a step with the matrices of all blocks."""
    graph = graphs[name]
    waits = {}
    for node in graph:
        own = node.op == "Depend" and len(node.inputs) > 1 and node.inputs[1] in graph.nodes
        waits[node.name] = own or any(waits.get(above, False) for above in node.inputs)
    made = [node for node in graph if not node.is_repeated and "blocks" in node.scope and is_made_of_weight(node)]
    assert len(made) >= MATRICES and all(waits[node.name] for node in made)
    # and none for the backward before the backward has come to it
    if name in INT8:
        assert sum(not node.is_backward for node in graph.of("Cast") if is_made_of_weight(node)) == MATRICES


def is_made_of_weight(node):
    """Of a matrix: vectors are small."""
    if not node.outputs or len(node.outputs[0].shape) != 2:
        return False
    return node.op == "AllGather" or (node.op == "Cast" and node.input_types[0].dtype == "Int8")


@pytest.mark.parametrize("name", INT8)
def test_int8_matrices_stay_int8_and_are_never_kept_whole(graphs, name):
    graph = graphs[name]
    loads = [node for node in graph.of("Load") if any(kind.dtype == "Int8" for kind in node.input_types)]
    assert len(loads) == MATRICES and all(kind.dtype == "Int8" for node in loads for kind in node.outputs)
    # their only readers are the casts to the compute type, in the forward and again in the backward
    readers = [n for n in graph if any(t.dtype == "Int8" for t in n.input_types) and n.op not in ir.STRUCTURE]
    assert {node.op for node in readers} <= {"Cast", "AllGather"}
    casts = [node for node in readers if node.op == "Cast"]
    assert {kind.dtype for node in casts for kind in node.outputs} == {"BFloat16"}
    assert sum(not node.is_backward for node in casts) == MATRICES
    shapes = {kind.shape for node in casts for kind in node.outputs}
    assert not [node for node in graph.kept() if any(kind.shape in shapes for kind in node.outputs)]
    # gradients are taken for the LoRA only, and so for no matrix
    made = {kind.shape for node in graph.of("MatMul") for kind in node.outputs}
    assert not made & shapes


def test_less_recomputing_keeps_more(graphs):
    def kept(name):
        return sum(node.bytes for node in graphs[name].kept())

    def attentions(name):
        return [node for node in graphs[name].kept() if "FlashAttentionScore" in node.scope]

    some, none = "fp16, attention", "int8, nothing recomputed"
    assert kept("step") < 0.5 * kept(some) and kept("int8, sharded") < 0.5 * kept(none)
    assert not attentions(some) and attentions(none), "the attention's results are not kept if it is computed again"
    assert graphs[some].counts()["FlashAttentionScore"] == 2 * blocks(some)
    assert graphs[none].counts()["FlashAttentionScore"] == blocks(none)


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_taken_for_the_lora_only(graphs, name):
    case = CASES.get(name, Case())
    rank = case.config.lora.rank
    lengths = {case.rows * n for n in (1, case.tokens, case.image_tokens, case.tokens + case.image_tokens)}
    backward = [node.outputs[0].shape for node in graphs[name].of("MatMul") if "Gradients" in node.scope]
    of_weights = [shape for shape in backward if rank in shape and shape[0] not in lengths]
    others = [shape for shape in backward if rank not in shape and shape[0] not in lengths]
    assert len(of_weights) == trained(name)
    # [rows * heads, D] is the rotary embedding's: it turns channels and has no weight
    assert {shape[1] for shape in others} <= {SMALL_WIDTHS["attention_head_dim"]}


def test_with_clip_gradients_are_taken_for_both_loras_only(graphs):
    graph, config = graphs["with CLIP"], WITH_CLIP.config
    rows = WITH_CLIP.rows * CLIP_TOKENS
    backward = [node.outputs[0].shape for node in graph.of("MatMul") if "Gradients" in node.scope]
    text_rank = config.text_encoder.text_encoder_rank
    of_text = [shape for shape in backward if text_rank in shape and shape[0] != rows]
    assert len(of_text) == 2 * 6 * CLIP_LAYERS, "two matrices in each of the six linear layers"
    lengths = {WITH_CLIP.rows * n for n in (1, WITH_CLIP.tokens, WITH_CLIP.image_tokens)} | {rows}
    lengths.add(WITH_CLIP.rows * (WITH_CLIP.tokens + WITH_CLIP.image_tokens))
    others = [s for s in backward if not {text_rank, config.lora.rank} & set(s) and s[0] not in lengths]
    assert {shape[1] for shape in others} <= {SMALL_WIDTHS["attention_head_dim"]}
    counts = graph.counts()
    assert counts["EmbeddingDenseBackward"] == counts["BiasAddGrad"] == 0, "no gradient of a frozen weight"


@pytest.mark.parametrize(
    ("name", "count"), [("step", 0), ("everything", 1), ("sharded", 1), ("with CLIP", 1), ("levers", 1)]
)
def test_one_all_reduce_for_each_update(graphs, name, count):
    assert graphs[name].counts()["AllReduce"] == count


def test_a_spread_base_is_gathered_again_and_not_kept(graphs):
    gathers = graphs["sharded"].of("AllGather")
    assert any(node.is_repeated for node in gathers)
    # matrices only: vectors are whole on every device
    assert all(
        len(node.input_types[0].shape) == 2
        for name in ("sharded", "int8, sharded")
        for node in graphs[name].of("AllGather")
    )
    assert all(kind.shape[0] == node.input_types[0].shape[0] * DEVICES for node in gathers for kind in node.outputs)
    assert not [node for node in graphs["sharded"].kept() if node.op == "AllGather" and "_blocks-" in node.scope]


def test_the_update_reads_and_writes_one_vector(graphs):
    counts = graphs["step"].counts()
    # for each trained tensor one slice of the vector and one assignment; the rest is the optimizer's state
    slices = [node for node in graphs["step"].of("Slice") if "optimizer" in node.scope]
    assert len(slices) == trained("step") and counts["Assign"] <= trained("step") + 8 and counts["TensorMove"] == 0
