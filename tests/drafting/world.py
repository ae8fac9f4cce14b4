"""A batch worth speculating on, the truth about it, and engines in any circumstances.

`Jobs` is eight requests of different kinds; `truth` runs each of them alone and without drafts;
`run` runs all with drafts and gives what the user gets. `Watch` looks at every step of an engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafting.methods import Method
from drumline.config import DrafterFacts, SpeculativeConfig
from drumline.core.params import SamplingParams
from drumline.core.plan import StepPlan, StepResult
from drumline.drafting.registry import drafter_facts
from drumline.drafting.testing import TRUTH
from drumline.engine.llm import LLM
from drumline.engine.opening import model_facts
from drumline.engine.outputs import RequestOutput
from drumline.models.checkpoint import open_checkpoint

LENGTH = 64
BLOCK = 4
NUMBERS = "float16"  # of keys and values, whatever the operations
VOCAB = 128

Job = tuple[tuple[int, ...], SamplingParams]
Signature = tuple[Any, ...]


def jobs(sampled: bool, longest: int | None = None) -> list[Job]:
    """Eight requests: shared prefixes, repetition, one that ends at max_model_len; with
    ``longest``, the engine's, they have draft lengths of their own, from 0 up to that."""
    draw = random.Random(11)
    shared = tuple(draw.randrange(5, VOCAB) for _ in range(12))
    found = []
    for index in range(8):
        prompt = tuple(draw.randrange(5, VOCAB) for _ in range([3, 5, 9, 1, 4, 8, 2, 6][index]))
        if index % 2:
            prompt = shared + prompt
        if index == 2:
            prompt = prompt[:3] * 5
        given: dict[str, Any] = {"max_tokens": 14, "logprobs": 2, "ignore_eos": index != 5}
        given |= {"seed": (200 if sampled else 100) + index, "temperature": 0.0}
        if index == 4:
            prompt, given["max_tokens"] = tuple(draw.randrange(5, VOCAB) for _ in range(50)), 14
        if index == 3:
            given["max_tokens"] = 6
        if sampled:
            given |= {"temperature": 0.8, "top_p": 0.9}
        if index in (1, 6):
            given |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "min_tokens": 4}
        if index == 6:
            given |= {"presence_penalty": 0.5, "logit_bias": {40: 2.0}, "bad_words": ("th",)}
        if index == 7:
            given |= {"prompt_logprobs": 1, "min_p": 0.01, "top_k": 40}
        if longest is not None:
            own = [None, 0, 1, 2, longest, 1, None, 0][index]
            given["num_speculative_tokens"] = own if own is None else min(own, longest)
        found.append((prompt, SamplingParams.from_mapping(given)))
    return found


def signature(output: RequestOutput) -> Signature:
    """All that a user gets, down to the last bit of every log-probability."""
    (one,) = output.outputs
    return one.token_ids, one.logprobs, output.prompt_logprobs, one.text, one.finish_reason


def truth(target: Path, sampled: bool) -> list[Signature]:
    """Each request alone, without drafts; fills in what the testing drafters know."""
    llm = engine(target, enable_prefix_caching=False)
    found = []
    for prompt, params in jobs(sampled):
        (output,) = llm.generate([prompt], params)
        found.append(signature(output))
        # What the target says beyond the end of the request: drafts may stand there.
        (beyond,) = llm.generate([prompt], replace(params, ignore_eos=True))
        tell(prompt, params, beyond.outputs[0].token_ids)
    return found


def tell(prompt: tuple[int, ...], params: SamplingParams, token_ids: tuple[int, ...]) -> None:
    """Lets the testing drafters know what a request's output is. Requests have seeds here."""
    assert params.seed is not None
    TRUTH[prompt, params.seed, 0] = prompt + token_ids


def engine(target: Path, speculative: dict[str, Any] | None = None, **settings: Any) -> LLM:
    own = {"max_model_len": LENGTH, "block_size": BLOCK, "kv_cache_dtype": NUMBERS, "threads": 1}
    settings = own | settings
    return LLM(model=str(target), speculative_config=speculative, **settings)


def cache_bytes(target: Path, speculative: dict[str, Any] | None, tokens: int) -> int:
    """``kv_cache_memory_bytes`` for so many tokens, the drafter's keys and values included."""
    checkpoint = open_checkpoint(target)
    size = model_facts(checkpoint).kv_bytes_per_token(NUMBERS)
    if speculative is not None:
        settings = SpeculativeConfig.from_mapping(speculative)
        facts: DrafterFacts = drafter_facts(settings, checkpoint)
        size += facts.kv_bytes_per_token(NUMBERS)
    return tokens * size


@dataclass
class Watch:
    """Every executed plan of an engine with its result, and what the model was fed."""

    llm: LLM
    steps: list[tuple[StepPlan, StepResult]] = field(default_factory=list)

    def __post_init__(self) -> None:
        execute = self.llm.core.worker.execute

        def watched(plan: StepPlan) -> StepResult:
            result = execute(plan)
            self.steps.append((plan, result))
            return result

        self.llm.core.worker.execute = watched  # type: ignore[method-assign]

    def gains(self) -> list[tuple[int, int]]:
        """(drafts, tokens) of every row that sampled, in order."""
        return [
            (len(row.drafts), len(outcome.tokens))
            for plan, result in self.steps
            for row, outcome in zip(plan.rows, result.rows, strict=True)
            if row.samples
        ]


def run(
    target: Path, method: Method, k: int, batch: list[Job], rounds: int = 1, **settings: Any
) -> tuple[LLM, list[Signature]]:
    """The batch through an engine that speculates; of several rounds the last."""
    keys = {
        name: settings.pop(name)
        for name in tuple(settings)
        if name in ("draft_length", "disable_padded_drafter_batch", "max_model_len_of_drafter")
        or name.startswith("num_speculative_tokens_")
    }
    speculative = method.speculative(target, k, **keys)
    tokens = settings.pop("cache_tokens", None)
    if tokens is not None:
        settings["kv_cache_memory_bytes"] = cache_bytes(target, speculative, tokens)
    llm = engine(target, speculative, **settings)
    for _ in range(rounds):
        outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
        assert llm.core.pool.usage == 0
        llm.core.scheduler.check()
    return llm, [signature(output) for output in outputs]
