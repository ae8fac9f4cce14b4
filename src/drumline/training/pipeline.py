"""`train`: data, features, vocabulary, training, evaluation, output; each stage can go on.

    DIR/config.json, model.safetensors, README.md     the head; config.json is written last
    DIR/curve.csv, curve.png                          the learning curve
    DIR/parts/run.json                                 what this run is; another one is refused here
    DIR/parts/data/, features-*.safetensors, checkpoint.safetensors

`DIR/parts` may be removed once the head is there. Reads conversations and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drumline.core.errors import ConfigError, UsageError
from drumline.models.config import ArchitectureConfig
from drumline.training.chain import Verifier
from drumline.training.conversations import (
    Recipe,
    note_recipe,
    piece_path,
    read_piece,
    read_recipe,
    user_header,
    write_piece,
)
from drumline.training.curve import Point, can_plot, plot_curve, read_curve, write_curve
from drumline.training.eagle3_module import Eagle3Head, default_taps
from drumline.training.evaluate import Acceptance, acceptance, hits, measure_sharpening
from drumline.training.features import (
    Example,
    features_path,
    read_features,
    read_recorded,
    split_held_out,
    write_features,
)
from drumline.training.mtp_module import MTPHead
from drumline.training.optimize import CHECKPOINT, Settings, Trainer
from drumline.training.output import Facts, head_config, round_weights, write_head
from drumline.training.progress import OutOfTime, Progress
from drumline.training.start import describe_start, load_weights, weights_digest
from drumline.training.target import Target
from drumline.training.vocabulary import DraftVocabulary, choose_vocabulary, full_vocabulary

if TYPE_CHECKING:
    from drumline.engine.llm import LLM

OpenLLM = Callable[[Path, tuple[int, ...]], "LLM"]
METHODS = ("mtp", "eagle3")
POINTS = 60  # of the learning curve; a checkpoint is written at each
MEASURED_EVERY = 10  # points between measurements on held-out conversations
MEASURED_MAX = 48  # conversations of such a measurement
SHARPENING_MAX = 48
TEMPERATURE = 0.8


@dataclass(frozen=True)
class Plan:
    """What to train. ``pieces``: indices of data pieces; ``draft_vocab_size`` None is all of it;
    ``start``: a head of the same form whose weights are the beginning; ``intermediate_size``: of
    the head's feed-forward, None is the target's; ``share_head``: an eagle3 head without rows of
    its own."""

    method: str
    output: Path
    data: Path
    pieces: tuple[int, ...]
    settings: Settings
    draft_vocab_size: int | None
    recipe: Recipe = field(default_factory=Recipe)
    held_out_share: float = 0.05
    start: Path | None = None
    intermediate_size: int | None = None
    share_head: bool = False

    @property
    def parts(self) -> Path:
        return self.output / "parts"

    def identity(self, target: Target) -> dict[str, Any]:
        """What must be equal for a run to go on."""
        return {
            "method": self.method,
            "target": target.digest,
            "pieces": list(self.pieces),
            "data_seed": self.recipe.seed,
            "settings": asdict(self.settings) | {"step_weights": [*self.settings.step_weights]},
            "draft_vocab_size": self.draft_vocab_size,
            "held_out_share": self.held_out_share,
            "start": None if self.start is None else weights_digest(self.start),
            "intermediate_size": self.intermediate_size,
            "share_head": self.share_head,
        }


def taps_of(method: str, layers: int) -> tuple[int, ...]:
    """Taps that features need: the head's own, and the last for the target's distribution."""
    own = (layers,) if method == "mtp" else default_taps(layers)
    return tuple(sorted({*own, layers}))


def train(
    plan: Plan, target: Target, open_llm: OpenLLM, progress: Progress
) -> dict[str, Acceptance] | None:
    """Runs what is left; the measured acceptance, or None if time ran out before the end.

    ``open_llm`` is called only if conversations are missing, with the folder where it shall record
    hidden states.
    """
    begin(plan, target)
    try:
        make_data(plan, target, open_llm, progress)
        examples = make_features(plan, target, progress)
        held_out, vocabulary, trainer, module = prepare(plan, target, examples)
        points = optimize(plan, target, trainer, vocabulary, held_out, progress)
    except OutOfTime:
        progress.say("time is over; the same command goes on from here")
        return None
    return finish(plan, target, examples, held_out, vocabulary, trainer, module, points, progress)


def begin(plan: Plan, target: Target) -> None:
    """Makes the folders, and notes what this run is or compares it with what began here."""
    if plan.method not in METHODS:
        raise ConfigError("method", plan.method, f"expected one of {', '.join(METHODS)}")
    if plan.share_head and plan.method != "eagle3":
        raise ConfigError("share_head", True, "an mtp head has no rows of its own as it is")
    try:
        plan.parts.mkdir(parents=True, exist_ok=True)
        plan.data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: not a folder to write to: {error.strerror}") from None
    path = plan.parts / "run.json"
    identity = json.loads(json.dumps(plan.identity(target)))
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        for key, value in identity.items():
            if before.get(key) != value:
                raise UsageError(
                    f"{plan.output}: a run with another {key} began here ({before.get(key)}, now "
                    f"{value}); use its flags or another folder"
                )
    path.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")


def make_data(plan: Plan, target: Target, open_llm: OpenLLM, progress: Progress) -> None:
    """Conversations of every piece that is not there yet."""
    missing = [index for index in plan.pieces if not piece_path(plan.data, index).exists()]
    if not missing:
        return
    user_header(target.tokenizer)  # a target without a chat template is refused at once
    note_recipe(plan.data, plan.recipe)
    taps = taps_of(plan.method, target.config.num_hidden_layers)
    total = len(plan.pieces)
    with (
        tempfile.TemporaryDirectory(dir=plan.parts, prefix="recorded-") as name,
        progress.stage("conversations, in pieces", total, total - len(missing)) as stage,
    ):
        folder = Path(name)
        llm = open_llm(folder, taps)
        for done, index in enumerate(missing, total - len(missing)):
            progress.tick()
            count = write_piece(llm, plan.data, index, plan.recipe)
            piece = read_piece(plan.data, index, target.config.vocab_size)
            recorded = read_recorded(folder, taps)
            bfloat16 = plan.settings.bfloat16
            write_features(target, plan.parts, index, piece, taps, bfloat16, recorded)
            for path in folder.iterdir():
                path.unlink()
            stage.at(done + 1, f"(+{count})")


def make_features(plan: Plan, target: Target, progress: Progress) -> list[Example]:
    """Features of every piece, made where they are missing, read from their files."""
    config = target.config
    taps = taps_of(plan.method, config.num_hidden_layers)
    missing = [i for i in plan.pieces if not features_path(plan.parts, i).exists()]
    total = len(plan.pieces)
    if missing:
        with progress.stage("features, in pieces", total, total - len(missing)) as stage:
            for done, index in enumerate(missing, total - len(missing)):
                progress.tick()
                piece = read_piece(plan.data, index, config.vocab_size)
                write_features(target, plan.parts, index, piece, taps, plan.settings.bfloat16)
                stage.at(done + 1)
    found: list[Example] = []
    for index in plan.pieces:
        found += read_features(plan.parts, index, target.digest, taps)
    # A chain needs one answer token to start from and one to draft.
    return [one for one in found if one.length - one.answer >= 2]


def prepare(
    plan: Plan, target: Target, examples: list[Example]
) -> tuple[list[Example], DraftVocabulary, Trainer, MTPHead | Eagle3Head]:
    """Held-out conversations, vocabulary, and the trainer, at its last checkpoint if it has one."""
    train_on, held_out = split_held_out(examples, plan.held_out_share)
    config = target.config
    if plan.draft_vocab_size is None:
        vocabulary = full_vocabulary(config.vocab_size)
    else:
        specials = (*config.eos_token_ids, *sorted(target.tokenizer.special_ids))
        vocabulary = choose_vocabulary(train_on, config.vocab_size, plan.draft_vocab_size, specials)
    verifier = Verifier.of(target, vocabulary)
    module = build_head(
        plan.method,
        target,
        vocabulary,
        plan.settings.seed,
        intermediate_size=plan.intermediate_size,
        share_head=plan.share_head,
    )
    module.start_from(target, verifier.rows)
    if plan.start is not None:
        load_weights(plan.start, module, module.prefix)
    trainer = Trainer(module, module, verifier, train_on, plan.settings)
    trainer.restore(plan.parts, run_digest(plan, target))
    return held_out, vocabulary, trainer, module


def build_head(
    method: str,
    target: Target,
    vocabulary: DraftVocabulary,
    seed: int,
    *,
    intermediate_size: int | None = None,
    share_head: bool = False,
) -> MTPHead | Eagle3Head:
    """A head with chance weights from ``seed``; no other generator is touched."""
    config = layer_sizes(target, intermediate_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        if method == "mtp":
            return MTPHead(config)
        return Eagle3Head(config, None if share_head else vocabulary.size)


def layer_sizes(target: Target, intermediate_size: int | None) -> ArchitectureConfig:
    """What a head's layer is made by: the target's sizes, but for its feed-forward."""
    width = intermediate_size or target.config.intermediate_size
    return replace(target.config, intermediate_size=width)


def run_digest(plan: Plan, target: Target) -> str:
    """Names a run, its data included."""
    digest = hashlib.sha256(json.dumps(plan.identity(target), sort_keys=True).encode())
    for index in plan.pieces:
        digest.update(piece_path(plan.data, index).read_bytes())
    return digest.hexdigest()


def optimize(
    plan: Plan,
    target: Target,
    trainer: Trainer,
    vocabulary: DraftVocabulary,
    held_out: list[Example],
    progress: Progress,
) -> list[Point]:
    """Trains to the end of the schedule; a checkpoint and a point of the curve now and then."""
    digest = run_digest(plan, target)
    csv = plan.output / "curve.csv"
    points = [point for point in read_curve(csv) if point.step <= trainer.step]
    total = len(trainer.order)
    every = max(1, total // POINTS)
    sample = held_out[:MEASURED_MAX]
    tokens, seconds = (points[-1].tokens, points[-1].seconds) if points else (0, 0.0)
    losses: list[float] = []

    def note(length: float) -> None:
        rate = trainer.schedule.at(max(0, trainer.step - 1))
        loss = sum(losses) / max(1, len(losses))
        points.append(Point(trainer.step, tokens, round(seconds, 1), rate, loss, length))
        losses.clear()
        trainer.save(plan.parts, digest)
        write_curve(csv, points)

    with progress.stage("training, in batches", total, trainer.step) as stage:
        while not trainer.done:
            began = time.monotonic()
            loss, seen = trainer.advance()
            seconds += time.monotonic() - began
            tokens += seen
            losses.append(loss)
            text = (
                f"loss {sum(losses) / len(losses):.3f}, {tokens / max(seconds, 1e-9):.0f} tokens/s"
            )
            if trainer.step % every == 0 or trainer.done:
                length = float("nan")
                if trainer.step % (every * MEASURED_EVERY) == 0 or trainer.done:
                    length = measure(plan, trainer, vocabulary, sample).mean_length
                    text += f", {length:.3f} tokens per pass"
                note(length)
            stage.at(trainer.step, text)
            if not trainer.done:
                try:
                    progress.tick()
                except OutOfTime:
                    if losses:
                        note(float("nan"))
                    raise
    return points


def measure(
    plan: Plan, trainer: Trainer, vocabulary: DraftVocabulary, examples: list[Example]
) -> Acceptance:
    steps = len(plan.settings.step_weights)
    tokens = plan.settings.batch_tokens
    table = hits(trainer.head, trainer.verifier, vocabulary, examples, steps, tokens)
    return acceptance(examples, table, steps)


def finish(
    plan: Plan,
    target: Target,
    examples: list[Example],
    held_out: list[Example],
    vocabulary: DraftVocabulary,
    trainer: Trainer,
    module: MTPHead | Eagle3Head,
    points: list[Point],
    progress: Progress,
) -> dict[str, Acceptance]:
    """Measures what will be written, as it will be written, and writes it."""
    progress.say("measuring on held-out conversations")
    round_weights(module)
    steps = len(plan.settings.step_weights)
    greedy = [one for one in held_out if one.greedy]
    sampled = [one for one in held_out if not one.greedy]
    found = {
        name: measure(plan, trainer, vocabulary, part)
        for name, part in (("greedy", greedy), ("sampled", sampled), ("all", held_out))
        if part
    }
    sharpening = measure_sharpening(
        module,
        trainer.verifier,
        target,
        vocabulary,
        (sampled or held_out)[:SHARPENING_MAX],
        steps,
        TEMPERATURE,
        plan.settings.batch_tokens,
        plan.settings.seed,
    )
    facts = Facts(
        target=target.name,
        method=plan.method,
        licence=target.licence,
        recipe=read_recipe(plan.data) or {"recipe": "not recorded"},
        settings=asdict(plan.settings) | {"starts from": describe_start(plan.start)},
        conversations=len(examples),
        held_out=len(held_out),
        answer_tokens=sum(one.length - one.answer for one in examples),
        tokens_seen=points[-1].tokens,
        seconds=points[-1].seconds,
        coverage=vocabulary.coverage(held_out),
        acceptance=found,
        sharpening=sharpening,
        parameters=sum(p.numel() for p in trainer.parameters.values()),
    )
    config = head_config(
        plan.method,
        layer_sizes(target, plan.intermediate_size),
        module.taps,
        vocabulary,
        steps,
        sharpening.best,
        target.name,
        plan.share_head,
    )
    write_head(plan.output, config, module, module.prefix, vocabulary, facts)
    if can_plot():
        plot_curve(plan.output / "curve.png", points, f"{plan.method} head for {target.name}")
    else:
        progress.say("no curve.png: matplotlib is not installed (pip install 'drumline[plot]')")
    return found


__all__ = ["CHECKPOINT", "METHODS", "Plan", "round_weights", "train", "weights_digest"]
