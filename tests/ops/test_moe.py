"""The grouped expert operation: bits of a row, ties, order of addition, an independent oracle."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from drumline.core.cpu import native_available
from drumline.ops import load_ops
from drumline.ops.base import Experts, Linear, Ops, Routing
from drumline.ops.weights import WeightTensor

HIDDEN, WIDTH, COUNT = 48, 40, 6


def weight(shape: tuple[int, ...], seed: int, scale: float = 0.2) -> WeightTensor:
    data = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return WeightTensor("w", shape, "F32", data)


GATES = [weight((WIDTH, HIDDEN), 10 + i) for i in range(COUNT)]
UPS = [weight((WIDTH, HIDDEN), 30 + i) for i in range(COUNT)]
DOWNS = [weight((HIDDEN, WIDTH), 50 + i) for i in range(COUNT)]
ROUTER = weight((COUNT, HIDDEN), 70)


@pytest.fixture(scope="module", params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "native" and not native_available():
        pytest.skip("the native module is not built")
    return load_ops(request.param, "cpu")


@pytest.fixture(scope="module")
def experts(ops: Ops) -> Experts:
    return ops.load_experts([[g, u] for g, u in zip(GATES, UPS, strict=True)], DOWNS)


@pytest.fixture(scope="module")
def router(ops: Ops) -> Linear:
    return ops.load_linear([ROUTER])


def rows(count: int, seed: int = 1) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed))


def block(
    ops: Ops, x: Tensor, router: Linear, experts: Experts, k: int, normalize: bool = True
) -> Tensor:
    routing = ops.route(ops.linear(x, router), k, normalize)
    return ops.combine(ops.expert_outputs(x, routing, experts), routing.weights)


@pytest.mark.parametrize("k", [1, 2, 3, COUNT])
def test_every_row_count_gives_the_same_bits(
    ops: Ops, k: int, router: Linear, experts: Experts
) -> None:
    x = rows(64)
    whole = block(ops, x, router, experts, k)
    for count in range(1, 65):
        assert torch.equal(block(ops, x[:count], router, experts, k), whole[:count])
        assert torch.equal(block(ops, x[64 - count :], router, experts, k), whole[64 - count :])


def test_permutations_and_neighbours_change_no_bit(
    ops: Ops, router: Linear, experts: Experts
) -> None:
    chooser = random.Random(3)
    x = rows(64)
    whole = block(ops, x, router, experts, 2)
    for _ in range(20):
        order = chooser.sample(range(64), 64)
        assert torch.equal(block(ops, x[order], router, experts, 2), whole[order])
    crowd = torch.cat((x[:1], x[5:6].expand(40, -1), x[1:2]))  # forty rows with the same experts
    out = block(ops, crowd, router, experts, 2)
    assert torch.equal(out[[0, 41]], whole[[0, 1]])
    assert torch.equal(out[1:41], whole[5:6].expand(40, -1))


def test_rows_with_all_logits_tied_take_the_lowest_ids(ops: Ops, experts: Experts) -> None:
    x = rows(33)
    flat = torch.zeros(33, COUNT)
    routing = ops.route(flat, 3, normalize=True)
    assert routing.experts.tolist() == [[0, 1, 2]] * 33
    whole = ops.expert_outputs(x, routing, experts)
    for count in (1, 2, 17, 32):
        part = ops.expert_outputs(x[:count], ops.route(flat[:count], 3, True), experts)
        assert torch.equal(part, whole[:count])


def test_ties_at_the_edge_go_to_the_lowest_id_in_ascending_order(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [0.0, -0.0, 5.0, 0.0, 7.0, -1.0]])
    routing = ops.route(logits, 3, normalize=False)
    assert routing.experts.tolist() == [[1, 2, 3], [0, 2, 4]]
    many = ops.route(torch.zeros(5, 300), 8, True)  # long rows take other sorting code
    assert many.experts.tolist() == [list(range(8))] * 5


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("k", [1, 2, COUNT])
def test_agrees_with_a_loop_over_tokens_in_float64(
    ops: Ops, k: int, normalize: bool, router: Linear, experts: Experts
) -> None:
    x = rows(20, seed=5)
    expected = []
    for row in x.double():
        odds = torch.softmax(ROUTER.data.double() @ row, 0)
        chosen = sorted(range(COUNT), key=lambda e: (-odds[e].item(), e))[:k]
        total = sum(odds[e].item() for e in chosen) if normalize else 1.0
        out = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in chosen:
            gate, up = GATES[e].data.double() @ row, UPS[e].data.double() @ row
            out += odds[e] / total * (DOWNS[e].data.double() @ (torch.sigmoid(gate) * gate * up))
        expected.append(out)
    ours = block(ops, x, router, experts, k, normalize)
    assert (ours.double() - torch.stack(expected)).abs().max() < 1e-5


def test_outputs_are_added_by_ascending_expert_id(ops: Ops) -> None:
    """Numbers whose float32 sum depends on the order: ((1e8 + 1) - 1e8) is 0, not 1."""
    outputs = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert ops.combine(outputs, torch.ones(1, 3)).item() == 0.0
    assert ops.combine(outputs[:, [0, 2, 1]], torch.ones(1, 3)).item() == 1.0


def test_an_experts_output_does_not_depend_on_who_else_was_asked(
    ops: Ops, experts: Experts
) -> None:
    """What expert parallelism will rely on: (token, expert) computed anywhere, the same bits."""
    x = rows(9)
    all_of_them = torch.arange(COUNT).expand(9, -1)
    whole = ops.expert_outputs(x, Routing(all_of_them, torch.ones(9, COUNT)), experts)
    for expert in range(COUNT):
        alone = Routing(torch.full((1, 1), expert), torch.ones(1, 1))
        for row in range(9):
            out = ops.expert_outputs(x[row : row + 1], alone, experts)
            assert torch.equal(out[0, 0], whole[row, expert])
