"""What ranks are asked to do in the tests of collectives. Each takes a rank's state first."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from drumline.core.ledger import Ledger
from drumline.parallel import gloo

State = dict[str, Any]


def values(rank: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """What rank ``rank`` brings: numbers of very different sizes, so that order shows in bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator)
    return x * 10.0 ** torch.randint(-4, 5, shape, generator=generator)


def reduce_all(state: State, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return state["comm"].all_reduce(values(state["comm"].rank, shape, seed))


def gather_all(state: State, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return state["comm"].all_gather(values(state["comm"].rank, shape, seed))


def exchange_all(state: State, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    comm = state["comm"]
    return comm.all_to_all(values(comm.rank, (comm.size, *shape), seed))


def broadcast_from(state: State, shape: tuple[int, ...], root: int, seed: int = 0) -> Tensor:
    comm = state["comm"]
    mine = values(comm.rank, shape, seed)
    before = mine.clone()
    out = comm.broadcast(mine, root)
    assert torch.equal(mine, before)
    return out


def gather_integers(state: State, count: int) -> Tensor:
    comm = state["comm"]
    return comm.all_gather(torch.arange(count) * (comm.rank + 1) + 2**40)


def wait_then_reduce(state: State, busy_seconds: list[float]) -> float:
    """Comes at its own time; returns the sum of ones."""
    end = time.monotonic() + busy_seconds[state["comm"].rank]
    while time.monotonic() < end:
        pass
    return float(state["comm"].all_reduce(torch.ones(3))[0])


def many(state: State, rounds: int) -> int:
    """Alternates collectives, with a different value each time; counts what came out right."""
    comm, good = state["comm"], 0
    total = comm.size * (comm.size - 1) / 2
    for round_ in range(rounds):
        x = torch.full((5,), float(comm.rank + round_))
        if round_ % 3 == 0:
            good += bool((comm.all_reduce(x) == total + comm.size * round_).all())
        elif round_ % 3 == 1:
            good += bool((comm.all_gather(x)[:, 0] == torch.arange(comm.size) + round_).all())
        else:
            root = round_ % comm.size
            good += bool((comm.broadcast(x, root) == root + round_).all())
    return good


def timed_reduces(state: State, numbers: int, rounds: int, name: str = "comm") -> list[float]:
    comm, x, seconds = state[name], torch.ones(numbers), []
    for _ in range(rounds):
        began = time.perf_counter()
        comm.all_reduce(x)
        seconds.append(time.perf_counter() - began)
    return seconds


def die(state: State) -> None:
    os._exit(3)


def different_calls(state: State) -> None:
    comm = state["comm"]
    if comm.rank == 1:
        comm.all_gather(torch.ones(6))
    else:
        comm.all_reduce(torch.ones(6))


def entries(state: State) -> list[tuple[str, str, tuple[int, ...], str, bool]]:
    return [
        (r.entry.operation, r.entry.group, r.entry.shape, r.entry.dtype, r.completed)
        for r in state["ledger"].ring().records
    ]


def begin(state: State, epoch: int, step: int, phase: str, part: int = 0) -> None:
    state["ledger"].begin(epoch, step)
    state["ledger"].enter(phase, part)


def join_gloo(state: State, port: int) -> None:
    gloo.join("127.0.0.1", port, state["rank"], state["count"], 20.0)
    everybody = tuple(range(state["count"]))
    ledger = state.setdefault("ledger", Ledger.in_memory(state["rank"]))
    shared = state.get("comm")
    state["shm"] = shared
    state["comm"] = gloo.gloo_comm("tp", everybody, state["rank"], ledger, seconds=2.0)
    state["pair"] = gloo.gloo_comm("ep", (1, 2), state["rank"], ledger, seconds=2.0)


def reduce_pair(state: State) -> tuple[int, float] | None:
    pair = state["pair"]
    if pair is None:
        return None
    return pair.rank, float(pair.all_reduce(torch.tensor([float(state["rank"])]))[0])


def leave_gloo(state: State) -> None:
    state["comm"] = state.pop("shm")
    gloo.leave()


def join_gloo_pair(state: State, port: int) -> None:
    gloo.join("127.0.0.1", port, state["rank"], state["count"], 20.0)
    state["shm"] = state["comm"]
    state["comm"] = gloo.gloo_comm("tp", (0, 1), state["rank"], state["ledger"], seconds=5.0)


def use_mesh(state: State) -> tuple[float, list[int], list[tuple[int, ...]] | None]:
    """A sum within the replica, everybody's rank, and what the leaders tell each other."""
    comms, rank = state["comms"], state["rank"]
    total = float(comms.tp.all_reduce(torch.tensor([float(rank)]))[0])
    everybody = comms.ep.all_gather(torch.tensor([rank]))[:, 0].tolist()
    agreed = None
    if comms.agreement is not None:
        agreed = list(comms.agreement.exchange((rank, 7, -(2**62)), 5.0))
    return total, everybody, agreed


def agree_alone(state: State) -> None:
    state["comms"].agreement.exchange((1,), 0.3)
