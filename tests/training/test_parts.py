"""The parts of training against slow twins, and what they refuse."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drumline.cli.main import main
from drumline.core.errors import ConfigError, UsageError
from drumline.training import questions
from drumline.training.chain import Batch, Verifier, batches, chain_loss, run_chain
from drumline.training.conversations import (
    Recipe,
    make_conversations,
    note_recipe,
    passage_turn,
    piece_indices,
    piece_path,
    read_piece,
    user_header,
    write_piece,
)
from drumline.training.curve import Point, read_curve, write_curve
from drumline.training.evaluate import acceptance
from drumline.training.features import Example, read_features, split_held_out, write_features
from drumline.training.pipeline import build_head, taps_of
from drumline.training.progress import Progress
from drumline.training.target import Target
from drumline.training.vocabulary import choose_vocabulary, full_vocabulary


def example(ids: list[int], answer: int, seed: int = 0, hidden: int = 32) -> Example:
    draw = torch.Generator().manual_seed(seed)
    taps = {k: torch.randn(len(ids), hidden, generator=draw) for k in (1, 2, 4)}
    return Example(torch.tensor(ids), answer, torch.tensor(ids), taps)


# ---------------------------------------------------------------- the chain


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_a_chain_in_a_batch_is_the_chain_alone(method: str, target: Target) -> None:
    """A chain in a padded batch, against one whose target has said nothing after its start."""
    vocabulary = full_vocabulary(target.config.vocab_size)
    head = build_head(method, target, vocabulary, 4)
    verifier = Verifier.of(target, vocabulary)
    one, other = example([*range(20, 31)], 4, 1), example([*range(40, 57)], 6, 2)
    with torch.no_grad():
        together = run_chain(head, verifier, Batch.of([one, other]), 3)
        for start in range(one.answer - 1, one.length - 5):
            taps = {k: v.clone() for k, v in one.taps.items()}
            for values in taps.values():
                values[start + 1 :] = 99.0
            alone = run_chain(head, verifier, Batch.of([replace(one, taps=taps)]), 3)
            for (chosen, rows), (own, expected) in zip(together, alone, strict=True):
                found = rows[chosen.tolist().index(start)]
                wanted = expected[own.tolist().index(start)]
                torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
                later = expected[own.tolist().index(start + 1)]
                assert not torch.allclose(rows[chosen.tolist().index(start + 1)], later)


def test_the_loss_is_the_cross_entropy_with_the_target(target: Target) -> None:
    vocabulary = choose_vocabulary([example([5, 6, 7, 8, 9, 5, 6], 2)], 96, 40, (2,))
    head = build_head("mtp", target, vocabulary, 4)
    verifier = Verifier.of(target, vocabulary)
    batch = Batch.of([example([*range(20, 31)], 4, 1), example([*range(40, 57)], 6, 2)])
    weights = (1.0, 0.5)
    total = torch.zeros(())
    with torch.no_grad():
        for step, (chosen, logits) in enumerate(run_chain(head, verifier, batch, 2)):
            losses = []
            for flat, row in zip(chosen.tolist(), logits, strict=True):
                b, i = divmod(flat, batch.ids.shape[1])
                hidden = batch.taps[4][b, i + 1 + step]
                p = target.model.compute_logits(hidden[None])[0][vocabulary.ids].softmax(0)
                losses.append(-(p * row.log_softmax(0)).sum())
            total += weights[step] * torch.stack(losses).mean()
        assert float(chain_loss(head, verifier, batch, weights)) == pytest.approx(
            float(total) / 1.5, rel=1e-5
        )


def test_chains_start_at_the_last_prompt_token() -> None:
    batch = Batch.of([example([*range(20, 30)], 4)])
    assert torch.nonzero(batch.counts(0)[0]).squeeze(1).tolist() == [3, 4, 5, 6, 7]
    assert torch.nonzero(batch.counts(2)[0]).squeeze(1).tolist() == [3, 4, 5]
    assert batch.ahead(batch.ids, 2)[0, :3].tolist() == [22, 23, 24]
    whole = Batch.of([example([*range(20, 30)], 4)], prompts=True)
    assert torch.nonzero(whole.counts(0)[0]).squeeze(1).tolist() == [*range(8)]


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_some_chains_end_after_their_first_draft(method: str, target: Target) -> None:
    vocabulary = full_vocabulary(96)
    head = build_head(method, target, vocabulary, 4)
    verifier = Verifier.of(target, vocabulary)
    batch = Batch.of([example([*range(20, 31)], 4, 1), example([*range(40, 57)], 6, 2)])
    with torch.no_grad():
        every = run_chain(head, verifier, batch, 3)
        second = run_chain(head, verifier, batch, 3, later_every=2)
    assert torch.equal(every[0][1], second[0][1])
    starts = [*range(3, 9, 2), *range(17 + 5, 17 + 15, 2)]
    for step in (1, 2):
        chosen, logits = every[step]
        picked, rows = second[step]
        assert picked.tolist() == [at for at in chosen.tolist() if at in starts]
        same = logits[[chosen.tolist().index(at) for at in picked.tolist()]]
        torch.testing.assert_close(rows, same, atol=1e-5, rtol=0)


def test_every_example_once_an_epoch() -> None:
    examples = [example([*range(5, 8 + n % 40)], 2) for n in range(70)]
    first = batches(examples, 128, 3, 0)
    assert sorted(i for group in first for i in group) == list(range(70))
    for group in first:
        assert max(examples[i].length for i in group) * len(group) <= 128
    assert first == batches(examples, 128, 3, 0)
    assert first != batches(examples, 128, 3, 1)
    assert first != batches(examples, 128, 4, 0)


# ---------------------------------------------------------------- measuring


def test_the_walk_counts_like_an_engine() -> None:
    """prompt 0 1, answer 2 .. 9; drafts of chain i are for tokens i + 2, i + 3, i + 4."""
    hit = torch.zeros(10, 3, dtype=torch.bool)
    hit[1] = torch.tensor([True, True, False])  # 3 4 right, the target gives 5
    hit[4] = torch.tensor([False, True, True])  # 6 wrong: what follows cannot count
    hit[5] = torch.tensor([True, True, True])  # 7 8 9 right, and the answer ends
    found = acceptance([example([*range(20, 30)], 2)], [hit], 3)
    assert found.mean_length == pytest.approx((3 + 1 + 3) / 3)
    assert found.chains == 7
    assert found.per_position == pytest.approx((2 / 7, 2 / 7, 1 / 7))


def test_equal_prompts_are_held_out_together() -> None:
    examples = [example([5 + n % 7, 6, 7, 8, n % 90], 3) for n in range(60)]
    train, held_out = split_held_out(examples, 0.3)
    assert len({tuple(one.ids[:3].tolist()) for one in held_out}) == 2
    assert len(train) + len(held_out) == 60
    assert not {one.held_out_rank for one in train} & {one.held_out_rank for one in held_out}
    with pytest.raises(UsageError, match="too few"):
        split_held_out(examples[:1], 0.3)


# ---------------------------------------------------------------- vocabulary, features, curve


def test_the_draft_vocabulary() -> None:
    examples = [example([90, 90, 7, 7, 7, 30, 30, 12], 2), example([90, 7, 30, 12], 1)]
    vocabulary = choose_vocabulary(examples, 96, 5, (2, 4))
    assert vocabulary.ids.tolist() == [2, 4, 7, 12, 30]
    assert (torch.arange(5) + vocabulary.d2t).tolist() == [2, 4, 7, 12, 30]
    assert torch.nonzero(vocabulary.t2d).squeeze(1).tolist() == [2, 4, 7, 12, 30]
    assert vocabulary.coverage(examples) == 1.0
    assert choose_vocabulary(examples, 96, 3, (2, 4)).coverage(examples) == pytest.approx(4 / 9)
    assert full_vocabulary(96).full
    for size in (1, 97):
        with pytest.raises(ConfigError, match="draft_vocab_size"):
            choose_vocabulary(examples, 96, size, (2, 4))


def test_features_are_the_targets_own(target: Target, conversations: Path, tmp_path: Path) -> None:
    piece = read_piece(conversations, 0, 96)[:9]
    taps = taps_of("eagle3", 4)
    assert taps == (1, 2, 4)
    write_features(target, tmp_path, 0, piece, taps)
    found = read_features(tmp_path, 0, target.digest, taps)
    with torch.inference_mode():
        alone: Any = target.prefill([piece[3].ids], taps)
    for tap in taps:
        assert found[3].taps[tap].dtype == torch.float16
        torch.testing.assert_close(found[3].taps[tap].float(), alone.taps[tap], atol=0.02, rtol=0)
    assert found[3].ids.tolist() == list(piece[3].ids)
    assert all(one.greedy for one in found), "greedy answers are known as such"
    answer = found[3].answer
    assert found[3].best[: answer - 1].tolist() == [-1] * (answer - 1)
    assert found[3].best[answer - 1 : -1].tolist() == found[3].ids[answer:].tolist()
    with pytest.raises(UsageError, match="another target"):
        read_features(tmp_path, 0, "other", taps)


def test_the_curve_survives_its_file(tmp_path: Path) -> None:
    points = [Point(1, 10, 0.5, 1e-3, 4.25, float("nan")), Point(2, 20, 1.0, 2e-3, 3.5, 1.25)]
    write_curve(tmp_path / "curve.csv", points)
    found = read_curve(tmp_path / "curve.csv")
    assert repr(found) == repr(points)
    (tmp_path / "curve.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a learning curve"):
        read_curve(tmp_path / "curve.csv")


# ---------------------------------------------------------------- conversations


def test_the_target_writes_its_own_questions(target: Target, llm: Any, tmp_path: Path) -> None:
    recipe = Recipe(seed=1, piece_size=24, user_tokens_max=40, answer_tokens_max=12)
    count = write_piece(llm, tmp_path, 0, recipe)
    piece = read_piece(tmp_path, 0, 96)
    assert len(piece) == count > 0
    header = target.tokenizer.encode(user_header(target.tokenizer), add_special_tokens=False)
    assert all(list(one.prompt_token_ids[: len(header)]) == header for one in piece)
    before = piece_path(tmp_path, 0).read_bytes()
    piece_path(tmp_path, 0).unlink()
    write_piece(llm, tmp_path, 0, recipe)
    assert piece_path(tmp_path, 0).read_bytes() == before
    assert piece_indices(tmp_path) == (0,)


def test_every_kind_of_user_turn(target: Target, llm: Any) -> None:
    """Free ones, openers, whole ones and passages: what each begins with, and that passages are
    answers."""
    recipe = Recipe(
        seed=3,
        piece_size=40,
        user_tokens_max=12,
        question_tokens_max=6,
        answer_tokens_max=6,
        documents_max=2,
        openers=("aa",),
        instructions=("bb {}", "{} cc"),
    )
    found = make_conversations(llm, 0, recipe)
    assert found == make_conversations(llm, 0, recipe)
    header = user_header(target.tokenizer)
    turns = [
        target.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False).partition(header)[
            2
        ]
        for one in found
    ]
    about = [n for n in range(40) if recipe.about_passage(n)]
    whole = [n for n in range(40) if recipe.question(n)]
    opened = [n for n in range(40) if n not in about + whole and recipe.opener(n)]
    assert about
    assert opened
    assert whole
    assert not set(about) & set(whole)
    assert len(about) + len(whole) + len(opened) < 40
    shown = [target.tokenizer.encode(recipe.question(n)) for n in whole]
    said = [target.tokenizer.decode(ids) for ids in shown]
    assert all(sum(turn.startswith(text) for turn in turns) == 1 for text in said)
    assert 0 < sum(turn.startswith("aa") for turn in turns) <= len(opened)
    asked = [one for one, turn in zip(found, turns, strict=True) if not turn.startswith("bb ")]
    answers = {target.tokenizer.decode(one.token_ids).strip() for one in asked}
    passages = [turn for turn in turns if turn.startswith("bb ")]
    assert passages
    assert all(any(answer and answer in turn for answer in answers) for turn in passages)


def test_whole_turns_have_no_slot_left_and_differ() -> None:
    recipe = Recipe(pattern_percent=100, passage_percent=0)
    turns = [recipe.question(number) for number in range(3000)]
    assert not any("{" in turn or "}" in turn for turn in turns)
    assert len(set(turns)) > 2000
    begun = {pattern.partition("{")[0] for pattern in questions.PATTERNS}
    assert all(any(turn.startswith(start) for turn in turns) for start in begun)
    assert [recipe.question(number) for number in range(50)] == turns[:50]


def test_every_slot_has_words() -> None:
    used = {name for pattern in questions.PATTERNS for name in questions.SLOT.findall(pattern)}
    assert used <= questions.WORDS.keys()
    assert questions.WORDS.keys() <= used, "words that no pattern uses"


def test_a_passage_is_documents_that_follow_each_other() -> None:
    recipe = Recipe(documents_max=3, instructions=("Say: {}",))
    documents = ["one", "two", "three", "four"]
    seen = set()
    for number in range(200):
        passage = passage_turn(recipe, number, documents).removeprefix("Say: ")
        parts = [part.rpartition(": ")[2] for part in passage.split("\n\n")]
        start = documents.index(parts[0])
        assert parts == [documents[(start + n) % 4] for n in range(len(parts))]
        assert ("Document 1: " in passage) <= (len(parts) > 1)
        seen.add((len(parts), "Document" in passage))
    assert seen == {(1, False), (2, False), (2, True), (3, False), (3, True)}
    assert passage_turn(recipe, 5, ["only"]) == "Say: only"


def test_a_turn_that_has_no_room_is_left_out(llm: Any) -> None:
    """The engine's sequences end at 128 tokens here; two of three documents do not fit."""
    recipe = Recipe(piece_size=30, user_tokens_max=12, answer_tokens_max=40, passage_percent=60)
    found = make_conversations(llm, 0, recipe)
    assert found
    assert all(len(one.ids) <= 128 for one in found)


def test_pieces_of_two_recipes_do_not_mix(tmp_path: Path) -> None:
    note_recipe(tmp_path, Recipe())
    note_recipe(tmp_path, Recipe())
    with pytest.raises(UsageError, match="another seed"):
        note_recipe(tmp_path, Recipe(seed=1))
    with pytest.raises(UsageError, match="another openers"):
        note_recipe(tmp_path, Recipe(openers=("Why",)))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ('{"prompt": "hi"}', "prompt_token_ids and token_ids"),
        ('{"prompt_token_ids": [], "token_ids": [1]}', "a list of token ids"),
        ('{"prompt_token_ids": [1], "token_ids": [96]}', "96 is not a token id below 96"),
        ('{"prompt_token_ids": [true], "token_ids": [1]}', "True is not a token id"),
    ],
)
def test_wrong_data_is_named(line: str, problem: str, tmp_path: Path) -> None:
    piece_path(tmp_path, 0).write_text(line + "\n")
    with pytest.raises(UsageError, match=problem) as caught:
        read_piece(tmp_path, 0, 96)
    assert "piece-00000.jsonl line 1" in str(caught.value)
    with pytest.raises(UsageError, match="no such piece"):
        read_piece(tmp_path, 1, 96)


# ---------------------------------------------------------------- the command


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code = main(["train", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    return capsys.readouterr().err


def test_wrong_use_is_one_line(
    capsys: pytest.CaptureFixture[str], target_path: Path, tmp_path: Path
) -> None:
    target, out = ("--target", str(target_path)), ("--output", str(tmp_path / "head"))
    file = tmp_path / "file"
    file.write_text("")
    assert "invalid choice: 'medusa'" in wrong(capsys, "medusa", *target, *out)
    assert "not a folder" in wrong(capsys, "mtp", *target, "--output", str(file))
    assert "not a folder" in wrong(capsys, "mtp", *target, *out, "--data", str(file))
    assert "epochs=0" in wrong(capsys, "mtp", *target, *out, "--epochs", "0")
    both = ("--full-vocab", "--draft-vocab-size", "50")
    assert "contradicts" in wrong(capsys, "mtp", *target, *out, *both)
    assert "no such file" in wrong(capsys, "mtp", "--target", str(tmp_path / "no"), *out)
    data = tmp_path / "data"
    data.mkdir()
    piece_path(data, 0).write_text("[]\n")
    error = wrong(capsys, "mtp", *target, *out, "--data", str(data))
    assert "piece-00000.jsonl line 1" in error
    assert error.count("\n") <= 2  # the stage that began, and the complaint


def test_a_target_without_a_chat_template_is_refused(
    tiny_path: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_path("llama", 5, vocab=96, hidden=32, layers=4), bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    error = wrong(capsys, "mtp", "--target", str(bare), "--output", str(tmp_path / "head"))
    assert "no chat template" in error


def test_the_command_from_start_to_end(
    conversations: Path, target_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    command = ["train", "mtp", "--target", str(target_path), "--output", str(out)]
    command += ["--data", str(conversations), "--epochs", "1", "--dtype", "float32"]
    assert main([*command, "--max-minutes", "0.00001"]) == 0
    assert "the same command goes on" in capsys.readouterr().err
    assert not (out / "config.json").exists()
    assert main(command) == 0
    assert "tokens per pass" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors", "README.md", "curve.csv"):
        assert (out / name).exists()


def test_progress_is_plain_lines_off_a_terminal() -> None:
    out = io.StringIO()
    with Progress(out=out).stage("pieces", 3, 1) as stage:
        stage.at(2)
        stage.at(3, "done")
    assert out.getvalue() == "pieces: 1/3\npieces: 3/3 done\n"


def test_no_chain_sees_a_pad(target: Target) -> None:
    vocabulary = full_vocabulary(96)
    head = build_head("mtp", target, vocabulary, 4)
    verifier = Verifier.of(target, vocabulary)
    short, long = example([*range(20, 28)], 3, 1), example([*range(30, 60)], 5, 2)

    def logits(examples: list[Example]) -> Tensor:
        with torch.no_grad():
            results = run_chain(head, verifier, Batch.of(examples), 3)
        return torch.cat([rows[chosen < len(short.ids) - 1] for chosen, rows in results])

    torch.testing.assert_close(logits([short]), logits([short, long]), atol=1e-5, rtol=0)
