"""Data with the hidden states it was made with, and going on from a head that is there."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from drumline.cli.main import main
from drumline.core.errors import CheckpointError, ConfigError
from drumline.engine.llm import LLM
from drumline.training import pipeline
from drumline.training.block import Memory
from drumline.training.chain import Verifier
from drumline.training.conversations import Recipe, read_piece
from drumline.training.copying import Copying
from drumline.training.evaluate import hits
from drumline.training.features import Example, read_features, split_held_out
from drumline.training.optimize import Settings, Trainer
from drumline.training.pipeline import Plan, build_head, taps_of, train
from drumline.training.progress import Progress
from drumline.training.target import Target, load_target
from drumline.training.vocabulary import full_vocabulary

RECIPE = Recipe(seed=2, piece_size=24, user_tokens_max=10, answer_tokens_max=12, passage_percent=20)


def quiet() -> Progress:
    return Progress(out=io.StringIO())


def no_llm(*_: object) -> LLM:
    raise AssertionError("every piece is there")


def test_conversations_come_with_the_states_they_were_made_with(
    make_plan: Callable[..., Plan], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's taps against a prefill pass, and no prefill pass is made."""
    taps = taps_of("eagle3", 4)
    plan = replace(make_plan("eagle3"), data=tmp_path / "data", recipe=RECIPE)
    (tmp_path / "data").mkdir()
    pipeline.begin(plan, target)

    def open_llm(folder: Path, wanted: tuple[int, ...]) -> LLM:
        assert wanted == taps
        return LLM(
            model=str(target.checkpoint.path),
            max_model_len=128,
            max_num_seqs=8,
            ops_backend="reference",
            speculative_config={
                "method": "extract_hidden_states",
                "hidden_states_dir": str(folder),
                "hidden_states_taps": list(wanted),
            },
        )

    with monkeypatch.context() as patch:
        patch.setattr(Target, "prefill", lambda *_: pytest.fail("a prefill pass"))
        pipeline.make_data(plan, target, open_llm, quiet())
    assert not list(plan.parts.glob("recorded-*"))
    for index in plan.pieces:
        piece = read_piece(plan.data, index, 96)
        found = read_features(plan.parts, index, target.digest, taps)
        assert [one.ids.tolist() for one in found] == [list(one.ids) for one in piece]
        assert [one.answer for one in found] == [len(one.prompt_token_ids) for one in piece]
        for one in found[::5]:
            with torch.inference_mode():
                alone = target.prefill([one.ids.tolist()], taps)
            for tap in taps:
                close = torch.testing.assert_close
                close(one.taps[tap][:-1].float(), alone.taps[tap][:-1], atol=0.02, rtol=0)
            best = target.model.compute_logits(alone.taps[4][one.answer - 1 : -1]).argmax(-1)
            assert (one.best[one.answer - 1 : -1] == best).float().mean() > 0.9


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_head_goes_on_from_another(
    method: str, make_plan: Callable[..., Plan], target: Target, tmp_path: Path
) -> None:
    first = make_plan(method, output="first", epochs=2)
    assert train(first, target, no_llm, quiet()) is not None
    plan = replace(make_plan(method, output="second", epochs=1), start=first.output)
    pipeline.begin(plan, target)
    examples = pipeline.make_features(plan, target, quiet())
    module = pipeline.prepare(plan, target, examples)[3]
    stored = load_file(first.output / "model.safetensors")
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, stored[module.prefix + name].float()), name
    assert train(plan, target, no_llm, quiet()) is not None
    card = (plan.output / "README.md").read_text()
    assert "training, starts from: chance" in (first.output / "README.md").read_text()
    begun = pipeline.weights_digest(first.output)[:12]
    assert f"training, starts from: weights {begun} (data: 120 conversations" in card


def test_a_head_of_another_form_is_no_start(
    make_plan: Callable[..., Plan], target: Target, tmp_path: Path
) -> None:
    plan = make_plan(epochs=1)
    pipeline.begin(plan, target)
    examples = pipeline.make_features(plan, target, quiet())

    def refused(folder: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            pipeline.prepare(replace(plan, start=folder), target, examples)
        return str(caught.value)

    assert "no weights to start from" in refused(tmp_path / "nothing")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert "another form of head" in refused(tmp_path)
    module = pipeline.prepare(plan, target, examples)[3]
    tensors = {module.prefix + name: value.detach() for name, value in module.named_parameters()}
    tensors[f"{module.prefix}input_proj.weight"] = torch.zeros(3, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert "input_proj.weight is (3, 4), this head needs (32, 64)" in refused(tmp_path)
    assert json.loads((plan.parts / "run.json").read_text())["start"] is None


@given(
    ids=st.lists(st.integers(5, 8), min_size=4, max_size=24),
    pad=st.integers(0, 3),
    step=st.integers(0, 2),
)
def test_followers_say_what_is_drafted_after_the_same_token(
    ids: list[int], pad: int, step: int
) -> None:
    """Against the words of the module: entry e carries token e + 1 and follows token e."""
    row = torch.tensor([ids + [0] * pad])
    starts = torch.arange(len(ids) - 2 - step if len(ids) > 2 + step else 0)[None]
    memory = Memory(starts, torch.ones_like(starts, dtype=torch.bool))
    found = Copying(row).followers(step, memory)
    for chain in range(starts.shape[1]):
        newest, wanted = ids[chain + 1 + step], ids[chain + 2 + step]
        expected = [e for e in range(chain + 1) if (ids[e], ids[e + 1]) == (newest, wanted)]
        assert torch.nonzero(found[0, chain]).squeeze(1).tolist() == expected


def test_copying_is_learned_from_being_told_where_to_look(tiny_path: Callable[..., Path]) -> None:
    """Words said twice, in orders that mean nothing: only a head that looks back can go on."""
    target = load_target(tiny_path("llama", 5, vocab=96, hidden=128, layers=4), "tiny")
    draw = Random(3)
    states = {
        tap: torch.randn(96, 128, generator=torch.Generator().manual_seed(tap))
        for tap in taps_of("eagle3", 4)
    }
    examples = []
    for _ in range(220):
        once = draw.sample(range(5, 96), 12)
        ids = torch.tensor(once + once)
        taps = {tap: rows[ids] for tap, rows in states.items()}
        # The target is certain of what comes: its last state is that token's row of its head.
        taps[4] = 40 * torch.nn.functional.normalize(target.head[ids.roll(-1)], dim=1)
        examples.append(Example(ids, 12, ids, taps))
    vocabulary = full_vocabulary(96)
    verifier = Verifier.of(target, vocabulary)
    right = {}
    for weight in (0.0, 1.0):
        head = build_head("eagle3", target, vocabulary, 4, share_head=True)
        head.start_from(target, verifier.rows)
        settings = Settings(1, 3, 0.03, 192, (1.0,), copy_weight=weight)
        trainer = Trainer(head, head, verifier, examples[20:], settings)
        while not trainer.done:
            trainer.advance()
        found = hits(head, verifier, vocabulary, examples[:20], 1, 192)
        right[weight] = sum(int(one[12:, 0].sum()) for one in found) / (20 * 10)
    assert right[1.0] > 0.8
    assert right[1.0] > right[0.0] + 0.3


def example(ids: list[int], answer: int) -> Example:
    return Example(torch.tensor(ids), answer, torch.tensor(ids), {})


def test_what_quotes_a_held_out_answer_is_not_trained_on() -> None:
    draw = Random(5)
    asked = [example([draw.randrange(5, 90) for _ in range(40)], 6) for n in range(40)]
    quoting = [
        example([n + 5, *one.ids[10:34].tolist(), 7, 8, 9], 26) for n, one in enumerate(asked)
    ]
    train, held_out = split_held_out(asked + quoting, 0.1)
    answers = [one for one in held_out if any(one is other for other in asked)]
    assert answers
    left = {id(one) for one in (*train, *held_out)}
    for one, quote in zip(asked, quoting, strict=True):
        if any(one is other for other in answers):
            assert all(quote is not other for other in train)
        else:
            assert id(quote) in left


def test_an_mtp_head_has_no_rows_to_share(make_plan: Callable[..., Plan], target: Target) -> None:
    plan = replace(make_plan("mtp"), share_head=True)
    with pytest.raises(ConfigError, match="share_head=True: an mtp head has no rows of its own"):
        pipeline.begin(plan, target)
    assert not plan.output.exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("copy_weight", "-1"),
        ("copy_weight", "inf"),
        ("copy_weight", "nan"),
        ("intermediate_size", "0"),
    ],
)
def test_numbers_that_train_nothing_are_refused(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "eagle3", "--target", "none", "--output", str(tmp_path / "head")]
    assert main([*arguments, f"--{flag.replace('_', '-')}", value]) == 2
    assert f"{flag}=" in capsys.readouterr().err
