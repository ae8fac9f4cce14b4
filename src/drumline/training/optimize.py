"""The training loop over chains, with everything that an interruption must not change.

Matrices of the layer learn by Muon (Jordan et al. 2024: momentum, orthogonalised), norms and an own
head by AdamW. Batches follow from (seed, epoch), the schedule from the step number, so a checkpoint
is the weights, the optimizers' state and the number of steps done. An interrupted run that goes on
ends with the bits of one that was never interrupted (at the same number of threads).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drumline.core.errors import UsageError
from drumline.training.chain import Batch, Head, Verifier, batches, chain_loss
from drumline.training.features import Example

CHECKPOINT = "checkpoint.safetensors"
BETAS = (0.9, 0.95)
ADAM_SHARE = 0.05  # of the learning rate: what AdamW's parameters get
MOMENTUM = "momentum_buffer"  # of Muon
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
NEWTON_STEPS = 3  # of Muon's orthogonalisation: five are no better here and a third of a batch
OWN_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then a cosine down to a twentieth. Steps are batches."""

    learning_rate: float
    warmup: int
    total: int

    def at(self, step: int) -> float:
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.total - self.warmup)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class Settings:
    """How a head is trained; ``step_weights`` has one entry for each draft step. Of the chains,
    every ``later_every``-th goes on after its first draft. ``copy_weight``: of `Copying.loss`."""

    seed: int
    epochs: int
    learning_rate: float
    batch_tokens: int
    step_weights: tuple[float, ...]
    weight_decay: float = 0.01
    clip: float = 1.0
    warmup_share: float = 0.04
    prompts: bool = False
    later_every: int = 1
    copy_weight: float = 0.0
    bfloat16: bool = False  # products in bfloat16; weights, sums and losses stay float32


class Trainer:
    """One head on its way; ``step`` counts the batches that it has seen."""

    def __init__(
        self,
        module: nn.Module,
        head: Head,
        verifier: Verifier,
        examples: Sequence[Example],
        settings: Settings,
    ) -> None:
        self.module = module
        self.head = head
        self.verifier = verifier
        self.examples = examples
        self.settings = settings
        self.step = 0
        self.parameters = dict(module.named_parameters())
        self.muon = torch.optim.Muon(
            self._matrices(),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            ns_steps=NEWTON_STEPS,
        )
        self.adam = torch.optim.AdamW(self._others(), betas=BETAS, weight_decay=0.0, foreach=False)
        self.epochs = [
            batches(examples, settings.batch_tokens, settings.seed, epoch)
            for epoch in range(settings.epochs)
        ]
        total = sum(len(epoch) for epoch in self.epochs)
        warmup = max(1, round(settings.warmup_share * total))
        self.schedule = Schedule(settings.learning_rate, warmup, total)
        self.order = [group for epoch in self.epochs for group in epoch]

    def _matrices(self) -> list[nn.Parameter]:
        return [p for n, p in self.parameters.items() if p.dim() == 2 and n != OWN_HEAD]

    def _others(self) -> list[nn.Parameter]:
        return [p for n, p in self.parameters.items() if p.dim() != 2 or n == OWN_HEAD]

    @property
    def done(self) -> bool:
        return self.step >= len(self.order)

    def advance(self) -> tuple[float, int]:
        """One batch: (its loss, its tokens)."""
        batch = Batch.of([self.examples[i] for i in self.order[self.step]], self.settings.prompts)
        rate = self.schedule.at(self.step)
        for optimizer, share in ((self.muon, 1.0), (self.adam, ADAM_SHARE)):
            for group in optimizer.param_groups:
                group["lr"] = share * rate
            optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.settings.bfloat16):
            loss = chain_loss(
                self.head,
                self.verifier,
                batch,
                self.settings.step_weights,
                self.settings.later_every,
                self.settings.copy_weight,
            )
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.module.parameters(), self.settings.clip)
            self.muon.step()  # type: ignore[no-untyped-call]
            self.adam.step()
        self.step += 1
        return float(loss.detach()), batch.tokens

    # ---- checkpoints ---------------------------------------------------------------------

    def save(self, folder: Path, digest: str) -> None:
        """Weights, optimizers' state and step, whole or not at all. ``digest`` names the run."""
        tensors = {name: value.detach() for name, value in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for optimizer in (self.muon, self.adam):
                state = optimizer.state.get(parameter, {})
                kept = [part for part in (MOMENTUM, *MOMENTS) if part in state]
                tensors |= {f"{part}|{name}": state[part] for part in kept}
        draft = folder / f"{CHECKPOINT}.new"
        save_file(tensors, draft, metadata={"step": str(self.step), "digest": digest})
        os.replace(draft, folder / CHECKPOINT)

    def restore(self, folder: Path, digest: str) -> bool:
        """Goes on from a checkpoint if there is one. `UsageError` if it is of another run."""
        path = folder / CHECKPOINT
        if not path.exists():
            return False
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path}: cannot be used, remove it: {error}") from None
        if metadata.get("digest") != digest:
            raise UsageError(
                f"{path}: a run with other data or settings has begun here; go on with those, or "
                "choose another folder"
            )
        self.step = int(metadata["step"])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
                self._restore_moments(parameter, name, tensors)
        return True

    def _restore_moments(self, parameter: Tensor, name: str, tensors: dict[str, Tensor]) -> None:
        if f"{MOMENTUM}|{name}" in tensors:
            self.muon.state[parameter] = {MOMENTUM: tensors[f"{MOMENTUM}|{name}"].clone()}
        if f"{MOMENTS[0]}|{name}" in tensors:
            self.adam.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                **{moment: tensors[f"{moment}|{name}"].clone() for moment in MOMENTS},
            }
