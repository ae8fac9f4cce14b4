"""What the target thinks of each conversation, kept as a safetensors file.

Taps come from where the conversation was made, if the engine recorded them there
(`extract_hidden_states`), else from one prefill pass in `target`.

    features-00007.safetensors
        ids      [tokens] int32              all conversations of piece 7, one after the other
        starts   [conversations + 1] int64   where each begins
        answers  [conversations] int64       tokens of its prompt: where its answer begins
        best     [tokens] int32              the target's greedy next token after the prompt and
                                             each token of the answer; -1 within the prompt
        tap.<k>  [tokens, hidden]            residual stream after k layers

Taps are float16 where every value fits it, else bfloat16: 2 bytes * hidden * taps for a token
(SmolLM2 1.2 KB for mtp). Passes over the data then cost no target pass, only its head's rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from drumline.core.errors import UsageError
from drumline.core.random import derive_seed
from drumline.training.conversations import Conversation
from drumline.training.target import Target

PASS_TOKENS = 2048  # tokens of one prefill pass
# Of an answer's tokens that are the best here: engines that multiply quantised activations disagree
# with themselves in float32 at one token in thirty; at temperature 0.8 it is one in three.
GREEDY_SHARE = 0.85
HALF_MAX = 60000.0
QUOTED = 16  # tokens in a row of an answer within a prompt are a quotation


@dataclass(frozen=True, eq=False)
class Example:
    """One conversation with its features. ``taps[k]``: ``[tokens, hidden]`` as stored."""

    ids: Tensor  # [tokens] int64
    answer: int  # index of the first answer token
    best: Tensor  # [tokens] int64; -1 within the prompt
    taps: dict[int, Tensor]

    @property
    def length(self) -> int:
        return self.ids.shape[0]

    @property
    def greedy(self) -> bool:
        """Whether the answer is (up to rounding) what the target says at temperature 0."""
        agree = self.best[self.answer - 1 : -1] == self.ids[self.answer :]
        return float(agree.float().mean()) >= GREEDY_SHARE

    @property
    def held_out_rank(self) -> int:
        """A number that follows from the prompt alone: equal prompts fall on the same side."""
        return derive_seed("held out", *self.ids[: self.answer].tolist())


def features_path(folder: Path, index: int) -> Path:
    return folder / f"features-{index:05d}.safetensors"


def read_recorded(folder: Path, taps: Sequence[int]) -> dict[tuple[int, ...], dict[int, Tensor]]:
    """By its tokens, what the engine recorded of every request (`drafting.extract`): rows for all
    tokens but the last, which was never read."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        rows = {tap: tensors[f"tap_{tap}"] for tap in taps}
        found[tuple(tensors["token_ids"].tolist())] = rows
    return found


def write_features(
    target: Target,
    folder: Path,
    index: int,
    piece: Sequence[Conversation],
    taps: tuple[int, ...],
    bfloat16: bool = False,
    recorded: Mapping[tuple[int, ...], dict[int, Tensor]] | None = None,
) -> None:
    """The features of one piece, written whole or not at all; a file that exists is left alone.
    ``bfloat16``: products in it, a third of the time for an error of about a hundredth.
    ``recorded``: `read_recorded`; conversations that are not in it get their prefill pass."""
    path = features_path(folder, index)
    if path.exists():
        return
    known = recorded or {}
    missing = [one for one in piece if one.ids[:-1] not in known]
    made: dict[tuple[int, ...], dict[int, Tensor]] = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        for part in _parts(missing):
            made |= _run(target, part, taps)
        rows = [made.get(one.ids) or _whole(known[one.ids[:-1]]) for one in piece]
        best = [
            _best(target, len(one.prompt_token_ids), own)
            for one, own in zip(piece, rows, strict=True)
        ]
    lengths = torch.tensor([0, *(len(one.ids) for one in piece)])
    tensors = {
        "ids": torch.tensor([token for one in piece for token in one.ids], dtype=torch.int32),
        "starts": lengths.cumsum(0),
        "answers": torch.tensor([len(one.prompt_token_ids) for one in piece]),
        "best": _cat(best, torch.int32),
    }
    for tap in taps:
        values = _cat([own[tap] for own in rows], torch.float32)
        fits = bool((values.abs() < HALF_MAX).all())
        tensors[f"tap.{tap}"] = values.to(torch.float16 if fits else torch.bfloat16)
    draft = path.with_suffix(".new")
    save_file(tensors, draft, metadata={"target": target.digest})
    os.replace(draft, path)


def _whole(rows: dict[int, Tensor]) -> dict[int, Tensor]:
    """With a row for the last token, the one before it once more: no chain reads it."""
    return {tap: torch.cat((values, values[-1:])) for tap, values in rows.items()}


def _cat(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([*parts]).to(dtype) if parts else torch.zeros(0, dtype=dtype)


def _parts(piece: Sequence[Conversation]) -> Iterator[list[Conversation]]:
    """Consecutive conversations of at most `PASS_TOKENS` together, at least one."""
    part: list[Conversation] = []
    for one in piece:
        if part and sum(len(other.ids) for other in part) + len(one.ids) > PASS_TOKENS:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


@torch.inference_mode()
def _run(
    target: Target, part: Sequence[Conversation], taps: tuple[int, ...]
) -> dict[tuple[int, ...], dict[int, Tensor]]:
    output = target.prefill([one.ids for one in part], taps)
    lengths = [len(one.ids) for one in part]
    rows = {tap: torch.split(output.taps[tap], lengths) for tap in taps}
    return {one.ids: {tap: rows[tap][at] for tap in taps} for at, one in enumerate(part)}


@torch.inference_mode()
def _best(target: Target, answer: int, rows: Mapping[int, Tensor]) -> Tensor:
    last = rows[target.config.num_hidden_layers][answer - 1 :].float()
    found = [target.model.compute_logits(part).argmax(-1) for part in torch.split(last, 256)]
    return torch.cat((torch.full((answer - 1,), -1), *found))


def read_features(folder: Path, index: int, digest: str, taps: Sequence[int]) -> list[Example]:
    """The examples of one piece. Raises `UsageError` if they are of another target, or broken."""
    path = features_path(folder, index)
    try:
        with safe_open(path, framework="pt") as file:
            found = (file.metadata() or {}).get("target")
            if found != digest:
                raise UsageError(f"{path}: features of another target; remove it")
            names = ("ids", "starts", "answers", "best", *(f"tap.{tap}" for tap in taps))
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: cannot be used, remove it: {reason}") from None
    starts: list[int] = tensors["starts"].tolist()
    answers: list[int] = tensors["answers"].tolist()
    return [
        Example(
            ids=tensors["ids"][start:end].long(),
            answer=answer,
            best=tensors["best"][start:end].long(),
            taps={tap: tensors[f"tap.{tap}"][start:end] for tap in taps},
        )
        for start, end, answer in zip(starts, starts[1:], answers, strict=False)
    ]


def split_held_out(
    examples: Sequence[Example], share: float
) -> tuple[list[Example], list[Example]]:
    """(to train on, held out): a share of the *prompts*, by their own hash, at least one. What
    quotes a held-out answer, as passages do, is in neither."""
    ranks = sorted({one.held_out_rank for one in examples})
    if len(ranks) < 2:
        raise UsageError(f"{len(examples)} conversations are too few to train on and to hold out")
    last = ranks[max(1, round(share * len(ranks))) - 1]
    held_out = [one for one in examples if one.held_out_rank <= last]
    said = {run for one in held_out for run in _runs(one.ids[one.answer :].tolist())}
    train = [
        one
        for one in examples
        if one.held_out_rank > last and said.isdisjoint(_runs(one.ids[: one.answer].tolist()))
    ]
    return train, held_out


def _runs(ids: list[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[at : at + QUOTED]) for at in range(len(ids) - QUOTED + 1))
