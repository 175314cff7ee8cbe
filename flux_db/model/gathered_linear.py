"""mindone's linear layer for ZeRO stage 3, around weights that are split already.

Its graph is mindone's: AllGather of the weight and of the bias, then the product. Only the splitting is left out,
because the rank has read no more than its part. A matrix of int8 is gathered as it is, and becomes whole afterwards.
"""

from __future__ import annotations

from mindone.models.modules.parallel.dense import Linear
from mindone.models.modules.parallel.param_wrapper import ZeroParamWrapper
from mindspore import Parameter, Tensor, nn

from flux_db.model import formulations
from flux_db.model.formulations import linear, when_needed
from flux_db.model.int8_linear import Int8Product, int8_linear


class Gather(ZeroParamWrapper):
    """Gathers a parameter that was loaded as a part, and passes on one that was loaded whole."""

    def check_rewrite(self, param: Parameter) -> bool:
        param.parallel_optimizer = param.sliced
        return param.sliced


class GatheredLinear(Linear):
    def set_param_wrapper(self, zero_stage: int, optimizer_parallel_group: str, cell_type: object = None) -> None:
        self.param_wrapper_w = Gather(self.net.weight, zero_stage, optimizer_parallel_group, cell_type)
        self.param_wrapper_b = nn.Identity()
        if self.net.has_bias:
            self.param_wrapper_b = Gather(self.net.bias, zero_stage, optimizer_parallel_group, cell_type)

    def construct(self, x: Tensor) -> Tensor:
        weight = self.param_wrapper_w(when_needed(self.net.weight, x))
        return linear(x, weight, self.param_wrapper_b(self.net.bias))


class GatheredInt8Product(Int8Product):
    """Gathers the matrix as int8, and once more for the backward."""

    def __init__(self, gather: Gather) -> None:
        super().__init__()
        self.gather = gather

    def whole(self, values: Tensor) -> Tensor:
        return self.gather(formulations.gatherable(values))


class GatheredInt8Linear(GatheredLinear):
    def set_param_wrapper(self, zero_stage: int, optimizer_parallel_group: str, cell_type: object = None) -> None:
        super().set_param_wrapper(zero_stage, optimizer_parallel_group, cell_type)
        self.gather_scale = Gather(self.net.weight_scale, zero_stage, optimizer_parallel_group, cell_type)
        self.product = GatheredInt8Product(self.param_wrapper_w)

    def construct(self, x: Tensor) -> Tensor:
        values, scale = formulations.as_argument(self.net.weight), self.gather_scale(self.net.weight_scale)
        return int8_linear(self.product, x, values, scale, self.param_wrapper_b(self.net.bias))
