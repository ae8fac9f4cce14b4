"""A feed-forward of experts, for the layers of targets and of drafters alike.

    logits = router(x)                         float32, one per expert
    chosen = the k highest, ties to the lowest id, in ascending order
    weight = softmax(logits)[chosen], divided by its sum where the checkpoint says so
    out    = sum over chosen, ascending, of weight * down(silu(gate(x)) * up(x))

(Shazeer et al. 2017; the router of Qwen3-MoE.) Outputs come back per token and expert and are
added at the token's owner, so that it does not matter where or beside whom an expert computed.
Knows no layer, attention or residual stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drumline.core.errors import CheckpointError
from drumline.models.config import ExpertsConfig
from drumline.ops.base import MoeWeights, Ops
from drumline.ops.weights import WeightTensor

FUSED_GATE_UP = "experts.gate_up_proj"
FUSED_DOWN = "experts.down_proj"


def expert_shapes(
    prefix: str, hidden_size: int, experts: ExpertsConfig
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of one block, under ``prefix`` (``model.layers.0.mlp``)."""
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (experts.count, hidden_size)}
    for expert in range(experts.count):
        name = f"{prefix}.experts.{expert}"
        shapes |= {
            f"{name}.gate_proj.weight": (experts.width, hidden_size),
            f"{name}.up_proj.weight": (experts.width, hidden_size),
            f"{name}.down_proj.weight": (hidden_size, experts.width),
        }
    return shapes


def load_experts(
    experts: ExpertsConfig,
    weights: Mapping[str, WeightTensor],
    ops: Ops,
    prefix: str,
    norm: Tensor,
    eps: float,
) -> MoeWeights:
    """Router and experts of one layer; ``weights`` has the names of `expert_shapes`."""
    names = [f"{prefix}.experts.{expert}" for expert in range(experts.count)]
    return MoeWeights(
        norm=norm,
        router=ops.load_linear([weights[f"{prefix}.gate.weight"]]),
        experts=ops.load_experts(
            [[weights[f"{n}.gate_proj.weight"], weights[f"{n}.up_proj.weight"]] for n in names],
            [weights[f"{n}.down_proj.weight"] for n in names],
        ),
        per_token=experts.per_token,
        normalize=experts.normalize,
        eps=eps,
    )


def split_fused_experts(path: Path, tensors: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """The same tensors with stacked experts taken apart, as views, under per-expert names.

    transformers 5 keeps ``experts.gate_up_proj [count, 2 * width, hidden]`` and
    ``experts.down_proj [count, hidden, width]`` in memory, and some checkpoints are saved so.
    CheckpointError for a stack that is no stack.
    """
    found: dict[str, WeightTensor] = {}

    def take(name: str, stack: WeightTensor, data: Tensor) -> None:
        if name in found or name in tensors:
            raise CheckpointError(path, f"tensor {name} is also in {stack.name}")
        found[name] = WeightTensor(name, tuple(data.shape), stack.kind, data)

    for name, weight in tensors.items():
        if name.endswith(FUSED_GATE_UP):
            _check_stack(path, weight, even=True)
            half = weight.shape[1] // 2
            prefix = name.removesuffix("gate_up_proj")
            for expert in range(weight.shape[0]):
                take(f"{prefix}{expert}.gate_proj.weight", weight, weight.data[expert, :half])
                take(f"{prefix}{expert}.up_proj.weight", weight, weight.data[expert, half:])
        elif name.endswith(FUSED_DOWN):
            _check_stack(path, weight, even=False)
            prefix = name.removesuffix("down_proj")
            for expert in range(weight.shape[0]):
                take(f"{prefix}{expert}.down_proj.weight", weight, weight.data[expert])
        else:
            found[name] = weight
    return found


def _check_stack(path: Path, weight: WeightTensor, even: bool) -> None:
    if len(weight.shape) != 3 or (even and weight.shape[1] % 2):
        raise CheckpointError(
            path, f"tensor {weight.name} has shape {list(weight.shape)}, no stack of experts"
        )
