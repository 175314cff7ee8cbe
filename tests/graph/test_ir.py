"""The reader of MindSpore's graphs, on a graph that is small enough to check by eye."""

from flux_db.graph import ir

# Two products in a recomputed cell, whose sum is kept; the backward repeats the first and reads a weight and a result.
TEXT = """
subgraph @main() {
  %0(CNode_1) = Load(%para1_w, UMonad[U])
      : (<Ref[Tensor[BFloat16]], (4, 4)>, <UMonad, NoShape>) -> (<Tensor[BFloat16], (4, 4)>)
      # Fullname with scope: (Default/Load-op0)
  %1(CNode_2) = PrimFunc_MatMul(%para0_x, %0, Bool(0), Bool(0)) cnode_attrs: {recompute: Bool(1)}
      : (<Tensor[BFloat16], (2, 4)>, <Tensor[BFloat16], (4, 4)>) -> (<Tensor[BFloat16], (2, 4)>)
      # Fullname with scope: (recompute_Default/block/MatMul-op0)
  %2(CNode_3) = PrimFunc_Sigmoid(%1)
      : (<Tensor[BFloat16], (2, 4)>) -> (<Tensor[Float32], (2, 4)>)
      # Fullname with scope: (recompute_Default/block/Sigmoid-op0)
  %3(CNode_4) = PrimFunc_Reshape(%2, (8))
      : (<Tensor[Float32], (2, 4)>) -> (<Tensor[Float32], (8)>)
      # Fullname with scope: (Default/Reshape-op0)
  %4(CNode_5) = PrimFunc_MatMul(%para0_x, %0, Bool(0), Bool(0)) cnode_attrs: {duplicated: Bool(1)}
      : (<Tensor[BFloat16], (2, 4)>, <Tensor[BFloat16], (4, 4)>) -> (<Tensor[BFloat16], (2, 4)>)
      # Fullname with scope: (recompute_Default/block/MatMul-op0)
  %5(CNode_6) = MakeTuple(%3, %4)
      : (<Tensor[Float32], (8)>, <Tensor[BFloat16], (2, 4)>) -> (<Tuple[Tensor[Float32],Tensor[BFloat16]], (0)>)
  %6(CNode_7) = PrimFunc_Concat(%5, I64(0))
      : (<Tuple[Tensor[Float32],Tensor[BFloat16]], (0)>) -> (<Tensor[Float32], (16)>)
      # Fullname with scope: (Gradients/Default/block/gradConcat-op0)
  Return(%6)
}
subgraph @branch() {
  %0(CNode_8) = PrimFunc_AllReduce(%para0_x)
      : (<Tensor[Float32], (3)>) -> (<Tensor[Float32], (3)>)
      # Fullname with scope: (Default/AllReduce-op0)
}
"""


def test_operators_types_and_what_is_kept():
    graph = ir.parse(TEXT)
    assert graph.counts()["MatMul"] == 2 and graph.counts()["AllReduce"] == 1 and len(graph.nodes) == 8
    assert graph.kernels() == 5, "neither Load, Reshape nor MakeTuple"
    first, repeated = graph.of("MatMul")
    assert (first.is_backward, repeated.is_backward, repeated.is_repeated) == (False, True, True)
    assert repeated.outputs == (ir.TensorType("BFloat16", (2, 4)),) and repeated.bytes == 16
    assert first.scope == "recompute_Default/block/MatMul-op0"
    # the sigmoid, through a view and a tuple; not the weight, which is in memory anyway
    assert [(node.op, node.bytes) for node in graph.kept()] == [("Sigmoid", 32)]


def test_what_is_in_memory_while_each_node_runs():
    steps = [(node.op, size) for node, size in ir.parse(TEXT).live()]
    # the product goes after the sigmoid, which stays, through its view and a tuple, until the concatenation
    assert steps[:7] == [
        ("Load", 0),
        ("MatMul", 16),
        ("Sigmoid", 48),
        ("Reshape", 32),
        ("MatMul", 48),
        ("MakeTuple", 48),
        ("Concat", 112),
    ]
