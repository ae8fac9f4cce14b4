"""Training end to end on a miniature target: it learns, goes on bit for bit, tells what it did."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drumline.core.errors import UsageError
from drumline.training import pipeline
from drumline.training.curve import read_curve
from drumline.training.pipeline import Plan, prepare, train
from drumline.training.progress import OutOfTime, Progress
from drumline.training.target import Target


def no_llm(*_: object) -> None:
    raise AssertionError("every piece is there: nothing is to be written by the target")


def quiet() -> Progress:
    return Progress(out=io.StringIO())


class Limited(Progress):
    """Time that ends after a number of looks at the clock."""

    def __init__(self, ticks: int) -> None:
        super().__init__(out=io.StringIO())
        self.left = ticks

    def tick(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OutOfTime


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_trained_head_accepts_more(
    method: str, make_plan: Callable[..., Plan], target: Target
) -> None:
    plan = make_plan(method)
    pipeline.begin(plan, target)
    examples = pipeline.make_features(plan, target, quiet())
    held_out, vocabulary, trainer, _ = prepare(plan, target, examples)
    before = pipeline.measure(plan, trainer, vocabulary, held_out)
    found = train(plan, target, no_llm, quiet())
    assert found is not None
    after = found["all"]
    points = read_curve(plan.output / "curve.csv")
    assert points[-1].loss < 0.85 * points[0].loss
    assert before.mean_length < 1.1
    assert after.mean_length > before.mean_length + 0.15
    assert list(after.per_position) == sorted(after.per_position, reverse=True)


def test_an_interrupted_run_ends_with_the_same_bits(
    make_plan: Callable[..., Plan], target: Target
) -> None:
    whole, parts = make_plan(output="whole", epochs=6), make_plan(output="parts", epochs=6)
    assert train(whole, target, no_llm, quiet()) is not None
    rounds = 1
    while train(parts, target, no_llm, Limited(5)) is None:
        rounds += 1
        assert rounds < 20
    assert rounds >= 3  # features, and at least two pieces of training
    ours = load_file(parts.output / "model.safetensors")
    for name, tensor in load_file(whole.output / "model.safetensors").items():
        assert torch.equal(tensor, ours[name]), name
    for name in ("config.json",):
        assert (whole.output / name).read_bytes() == (parts.output / name).read_bytes()


def test_another_run_in_the_same_folder_is_refused(
    make_plan: Callable[..., Plan], target: Target
) -> None:
    assert train(make_plan(epochs=1), target, no_llm, quiet()) is not None
    with pytest.raises(UsageError, match="another settings"):
        train(make_plan(epochs=2), target, no_llm, quiet())
    with pytest.raises(UsageError, match="another draft_vocab_size"):
        train(make_plan(epochs=1, draft_vocab_size=50), target, no_llm, quiet())


def test_the_card_has_the_numbers(make_plan: Callable[..., Plan], target: Target) -> None:
    plan = make_plan(epochs=2)
    found = train(plan, target, no_llm, quiet())
    assert found is not None
    card = (plan.output / "README.md").read_text()
    for one in found.values():
        assert f"{one.mean_length:.3f}" in card
        assert all(f"{rate:.3f}" in card for rate in one.per_position)
    for words in ("license: ", "training, seed: 1", "answer tokens", "80 of 96 tokens", "held-out"):
        assert words in card, words
    config = json.loads((plan.output / "config.json").read_text())
    sharpening = config["draft_sharpening"]
    assert sharpening == "greedy" or sharpening >= 1


def test_the_held_out_prompts_are_never_trained_on(
    make_plan: Callable[..., Plan], target: Target
) -> None:
    plan = make_plan()
    pipeline.begin(plan, target)
    examples = pipeline.make_features(plan, target, quiet())
    held_out, _, trainer, _ = prepare(plan, target, examples)

    def prompts(of: list) -> set:
        return {tuple(one.ids[: one.answer].tolist()) for one in of}

    assert len(held_out) + len(trainer.examples) == len(examples) == 120
    assert len(held_out) >= 12
    assert not prompts(held_out) & prompts(list(trainer.examples))


def test_training_reads_the_conversations_alone(
    make_plan: Callable[..., Plan], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies beside, evaluation prompts above all, is not opened."""
    plan = make_plan(epochs=1)
    opened: list[Path] = []
    read_text, read_bytes = Path.read_text, Path.read_bytes

    def note_text(path: Path, *args: object, **kwargs: object) -> str:
        opened.append(path)
        return read_text(path, *args, **kwargs)  # type: ignore[arg-type]

    def note_bytes(path: Path) -> bytes:
        opened.append(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_text", note_text)
    monkeypatch.setattr(Path, "read_bytes", note_bytes)
    (plan.data / "evaluation.jsonl").write_text("not even JSON")
    assert train(plan, target, no_llm, quiet()) is not None
    assert opened
    for path in opened:
        ours = path.name.startswith("piece-") or path.is_relative_to(plan.output)
        assert ours or path.name == "recipe.json", path
