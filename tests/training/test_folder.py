"""A trained folder is what the engine reads, and drafts there what the training module drafts."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafting.golden_world import Piece, build, random_tokens
from drumline.core.params import SamplingParams
from drumline.engine.llm import LLM
from drumline.training import pipeline
from drumline.training.chain import Batch, Verifier, run_chain
from drumline.training.features import Example
from drumline.training.pipeline import Plan, build_head, taps_of, train
from drumline.training.progress import Progress
from drumline.training.target import Target
from drumline.training.vocabulary import DraftVocabulary, full_vocabulary

K = 3
TOKENS = random_tokens(7, 15, 96)


def no_llm(*_: object) -> LLM:
    raise AssertionError("every piece is there")


def trained(plan: Plan, target: Target) -> Path:
    assert train(
        plan, target, lambda *_: pytest.fail("no data to make"), Progress(out=io.StringIO())
    )
    return plan.output


def own_drafts(folder: Path, method: str, target: Target, **form: Any) -> tuple[int, ...]:
    """The greedy chain after `TOKENS` by the training module, its drafts fed back to it."""
    tensors = load_file(folder / "model.safetensors")
    size = target.config.vocab_size
    vocabulary = full_vocabulary(size)
    if "d2t" in tensors:
        d2t = tensors.pop("d2t")
        del tensors["t2d"]
        vocabulary = DraftVocabulary(d2t + torch.arange(len(d2t)), size)
    head = build_head(method, target, vocabulary, 0, **form)
    prefix = head.prefix
    head.load_state_dict({name.removeprefix(prefix): t.float() for name, t in tensors.items()})
    taps = taps_of(method, target.config.num_hidden_layers)
    output = target.prefill([TOKENS[:-1]], taps)
    verifier = Verifier.of(target, vocabulary)
    drafts: list[int] = []
    last = len(TOKENS) - 2  # the entry of the newest token's pair
    for step in range(K):
        ids = torch.tensor([*TOKENS, *drafts, *[0] * (K - step + 1)])
        hidden = {k: torch.zeros(len(ids), v.shape[1]) for k, v in output.taps.items()}
        for tap, values in output.taps.items():
            hidden[tap][: len(values)] = values
        example = Example(ids, last + 1, torch.zeros_like(ids), hidden)
        results = run_chain(head, verifier, Batch.of([example]), K)
        chosen, logits = results[step]
        row: Tensor = logits[chosen.tolist().index(last)]
        drafts.append(int(vocabulary.ids[row.argmax()]))
    return tuple(drafts)


@pytest.mark.parametrize(
    ("method", "size", "form"),
    [
        ("mtp", 80, {}),
        ("mtp", None, {"intermediate_size": 40}),
        ("eagle3", 80, {}),
        ("eagle3", None, {}),
        ("eagle3", 80, {"share_head": True, "intermediate_size": 40}),
        ("eagle3", None, {"share_head": True}),
    ],
)
def test_the_engine_drafts_what_training_drafts(
    method: str,
    size: int | None,
    form: dict[str, Any],
    make_plan: Callable[..., Plan],
    target: Target,
) -> None:
    plan = replace(make_plan(method, epochs=6, draft_vocab_size=size), **form)
    folder = trained(plan, target)
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (
        method == "eagle3" and not form.get("share_head")
    )
    with torch.inference_mode():
        world = build(method, target.checkpoint.path, folder)
        sequence = world.sequence(TOKENS)
        world.step([Piece(sequence, 6, samples=False)], K)
        (drafts,) = world.step([Piece(sequence, len(TOKENS) - 7, k=K)], K)
        assert drafts == own_drafts(folder, method, target, **form)


def test_the_measured_length_is_what_the_engine_reaches(
    make_plan: Callable[..., Plan], target: Target
) -> None:
    """The walk over held-out answers against an engine that verifies for real."""
    plan = make_plan(epochs=20)
    folder = trained(plan, target)
    examples = pipeline.make_features(plan, target, Progress(out=io.StringIO()))
    held_out, vocabulary, trainer, module = pipeline.prepare(plan, target, examples)
    pipeline.round_weights(module)
    expected = pipeline.measure(plan, trainer, vocabulary, held_out)
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": K}
    llm = LLM(
        model=str(target.checkpoint.path),
        max_model_len=128,
        ops_backend="reference",
        speculative_config=speculative,
    )
    passes = tokens = 0
    for one in held_out:
        prompt = tuple(one.ids[: one.answer].tolist())
        count = one.length - one.answer
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == tuple(one.ids[one.answer :].tolist())
        stats = output.outputs[0].speculation
        assert stats is not None
        passes += count - 1 - stats.accepted  # a pass keeps its accepted drafts and one token more
        tokens += count - 1
    assert expected.mean_length == pytest.approx(tokens / passes, abs=0.01)
    assert expected.mean_length > 1.1


def test_formats(make_plan: Callable[..., Plan], target: Target) -> None:
    folder = trained(make_plan(epochs=1), target)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "mtp"
    assert config["draft_vocab_size"] == 80
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == K
    assert config["speculators_config"]["default_proposal_method"] == method["proposal_type"]
    tensors = load_file(folder / "model.safetensors")
    d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    ids = torch.arange(80) + d2t
    assert t2d.dtype == torch.bool
    assert t2d.shape == (96,)
    assert torch.equal(torch.nonzero(t2d).squeeze(1), ids)
    assert t2d[list(target.config.eos_token_ids)].all()
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    assert all(name.startswith("mtp_layers.0.") for name in tensors)
    assert len(tensors) == 13


def test_the_full_vocabulary_is_the_plain_format(
    make_plan: Callable[..., Plan], target: Target
) -> None:
    folder = trained(make_plan(epochs=1, draft_vocab_size=None), target)
    assert "draft_vocab_size" not in json.loads((folder / "config.json").read_text())
    assert not {"d2t", "t2d"} & set(load_file(folder / "model.safetensors"))
