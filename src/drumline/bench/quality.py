"""What a backend's arithmetic does to a model's answers, against the reference operations.

The model itself writes the texts: short answers, greedily, and longer ones drawn from a seed.
Then both backends read them, whole sequences from position 0 (teacher forcing), and their
distributions are compared position by position. Weights are the same on both sides, so what is
measured is the arithmetic alone: quantized activations, the cache's type, orders of sums. It
refuses to say whether the model is any good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ConfigError
from drumline.core.params import SamplingParams
from drumline.drafting.base import TargetModel
from drumline.engine.llm import LLM
from drumline.models.checkpoint import Checkpoint, open_checkpoint
from drumline.models.registry import model_module
from drumline.ops import load_ops
from drumline.ops.base import Ops, PagedBatch

OPENERS = (
    "The harbour was quiet that morning, and",
    "To bake a loaf of bread you need",
    "A train leaves the station at nine and",
    "My grandmother used to say that",
    "The difference between weather and climate is",
    "def count_words(text):",
    "Dear Sir or Madam, I am writing because",
    "Once the lights went out, the children",
    "The history of the printing press begins",
    "In the garden behind the school there",
    "When water freezes, its molecules",
    "Three friends decided to open a café",
    "The shortest way from here to the river",
    "Before you climb a mountain, you should",
    "An honest answer to your question would be",
    "The committee met on Tuesday to discuss",
    "A good chess player looks at",
    "Between the two villages ran an old road",
    "Light travels faster than sound, which is why",
    "The last page of the diary said",
)
BLOCK = 16  # tokens to a block of the caches here

LEAST_AGREEMENT = 0.97
MOST_DIVERGENCE = 2e-3
MOST_PERPLEXITY_CHANGE = 5e-3


@dataclass(frozen=True, slots=True)
class Quality:
    """``agreement``: share of positions of the greedy texts where both backends prefer the same
    token. ``divergence``: mean Kullback-Leibler divergence from the reference's distribution there,
    in nats. Perplexities are those of the drawn texts."""

    backend: str
    positions: int
    agreement: float
    divergence: float
    text_tokens: int
    perplexity: float
    reference_perplexity: float

    @property
    def perplexity_change(self) -> float:
        return self.perplexity / self.reference_perplexity - 1.0

    def failures(self) -> list[str]:
        """What lies beyond the limits, in words; empty if nothing does. Not a number fails."""
        checks = (
            (self.agreement >= LEAST_AGREEMENT, f"agreement is under {LEAST_AGREEMENT:.0%}"),
            (self.divergence < MOST_DIVERGENCE, f"divergence is not under {MOST_DIVERGENCE:g}"),
            (
                abs(self.perplexity_change) <= MOST_PERPLEXITY_CHANGE,
                f"perplexity changes by more than {MOST_PERPLEXITY_CHANGE:.1%}",
            ),
        )
        return [problem for kept, problem in checks if not kept]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"failures": self.failures()}


class Reader:
    """A model under one backend, reading whole sequences."""

    def __init__(self, model: TargetModel, ops: Ops, kv_dtype: str) -> None:
        self.model, self.ops, self.kv_dtype = model, ops, kv_dtype

    @classmethod
    def load(cls, checkpoint: Checkpoint, backend: str, kv_dtype: str) -> Reader:
        ops = load_ops(backend, "cpu")
        module = model_module(checkpoint.config.model_type)
        length = checkpoint.config.max_context_length
        model: TargetModel = module.Model(checkpoint.config, checkpoint.tensors, ops, length)
        return cls(model, ops, kv_dtype)

    def logits(self, sequence: Sequence[int], first: int) -> Tensor:
        """What the model expects after each of ``sequence[first - 1 : -1]``:
        ``[len(sequence) - first, vocab]``."""
        read = sequence[:-1]
        blocks = -(-len(read) // BLOCK)
        spec = self.model.kv_spec
        cache = self.ops.allocate_kv(
            spec.layers, blocks, BLOCK, spec.kv_heads, spec.head_dim, self.kv_dtype
        )
        places = torch.arange(len(read))
        batch = PagedBatch(places, places, (0, len(read)), (tuple(range(blocks)),))
        hidden = self.model.forward(torch.tensor(read), batch, cache).hidden
        return self.model.compute_logits(hidden[first - 1 :].contiguous())


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the model: opener and continuation, of which ``first`` is the first token."""

    tokens: tuple[int, ...]
    first: int


def write_texts(llm: LLM, temperature: float, length: int) -> list[Text]:
    """One text for each opener, ``length`` tokens long without it."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, seed=seed, ignore_eos=True)
        for seed in range(len(OPENERS))
    ]
    outputs = llm.generate(list(OPENERS), params)
    return [
        Text((*one.prompt_token_ids, *one.outputs[0].token_ids), len(one.prompt_token_ids))
        for one in outputs
    ]


def compare(
    greedy: Sequence[Text], drawn: Sequence[Text], candidate: Reader, reference: Reader
) -> Quality:
    """Reads every text with both."""
    agreed = positions = 0
    divergence = 0.0
    for ours, theirs, _ in _read(greedy, candidate, reference):
        agreed += int((ours.argmax(1) == theirs.argmax(1)).sum())
        expected = theirs.log_softmax(1)
        divergence += float((expected.exp() * (expected - ours.log_softmax(1))).sum())
        positions += len(ours)
    surprise = reference_surprise = 0.0
    tokens = 0
    for ours, theirs, chosen in _read(drawn, candidate, reference):
        surprise -= float(ours.log_softmax(1).gather(1, chosen).sum())
        reference_surprise -= float(theirs.log_softmax(1).gather(1, chosen).sum())
        tokens += len(chosen)
    return Quality(
        backend=candidate.ops.name,
        positions=positions,
        agreement=agreed / positions,
        divergence=divergence / positions,
        text_tokens=tokens,
        perplexity=math.exp(surprise / tokens),
        reference_perplexity=math.exp(reference_surprise / tokens),
    )


def _read(
    texts: Sequence[Text], candidate: Reader, reference: Reader
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Logits of both in double precision, and the tokens that followed ``[n, 1]``."""
    for text in texts:
        chosen = torch.tensor(text.tokens[text.first :]).unsqueeze(1)
        with torch.inference_mode():
            ours, theirs = (
                reader.logits(text.tokens, text.first).double() for reader in (candidate, reference)
            )
        yield ours, theirs, chosen


def measure_quality(llm: LLM, greedy_length: int = 64, drawn_length: int = 500) -> Quality:
    """Compares the engine's backend with the reference operations on texts that it writes.

    Raises `ConfigError` for texts without tokens or longer than the model's context, and for an
    engine that runs on the reference operations itself.
    """
    resolved = llm.core.resolved
    if resolved.ops_backend == "reference":
        raise ConfigError("ops_backend", "reference", "is what quality is measured against")
    room = resolved.max_model_len - max(len(llm.tokenizer.encode(opener)) + 1 for opener in OPENERS)
    for length in (greedy_length, drawn_length):
        if not 1 <= length <= room:
            raise ConfigError("output_len", length, f"must be from 1 to {room}")
    greedy = write_texts(llm, 0.0, greedy_length)
    drawn = write_texts(llm, 1.0, drawn_length)
    quantization = resolved.config.model.quantization
    checkpoint = open_checkpoint(llm.core.facts.model_path, quantization)
    candidate = Reader.load(checkpoint, resolved.ops_backend, resolved.kv_cache_dtype)
    return compare(greedy, drawn, candidate, Reader.load(checkpoint, "reference", "float32"))
