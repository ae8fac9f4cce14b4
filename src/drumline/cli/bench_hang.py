"""``drumline bench hang``: its flags, its words, its exit status. What runs is `bench.hang`'s."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from drumline.bench.hang import Outcome, Scenario
    from drumline.config import EngineConfig

SCENARIOS = ("near-limit", "draft-length")
POLICIES = ("agreed", "local")
SCALES = ("full", "small")
DRAFTERS = ("mtp", "eagle3", "draft-model", "dense")
# What the scenario fixes; the rest of the engine's flags may be given.
FIXED = (
    *("data_parallel_size", "tensor_parallel_size", "enable_expert_parallel", "max_model_len"),
    *("speculative_config", "spec_method", "spec_tokens"),
)


def add_hang_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenario", choices=SCENARIOS, help="hang: which of the two")
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default="agreed",
        help="hang: local switches the old decision on, which each rank takes alone",
    )
    parser.add_argument(
        "--scale", choices=SCALES, default="full", help="hang: as reported, or a run of seconds"
    )
    parser.add_argument(
        "--drafter",
        choices=DRAFTERS,
        default="mtp",
        help="hang: who drafts; dense has no experts, so that nobody waits for it",
    )


def run_hang(args: argparse.Namespace, config: EngineConfig) -> int:
    """0 if the run completes with the tokens of one replica without speculation, 1 if not."""
    if args.scenario is None:
        raise UsageError(f"--scenario: hang needs one of {', '.join(SCENARIOS)}")
    for name in FIXED:
        if name in config.sources:
            raise ConfigError(name, config.get(name), "the scenario says it")
    own = ("model", "spec_model")
    settings = {name: config.get(name) for name in config.sources if name not in own}
    if "spec_model" in config.sources and "model" not in config.sources:
        raise ConfigError("spec_model", config.get("spec_model"), "needs the --model it is for")

    from drumline.bench.hang import Hang, scenario, tiny_model

    what = scenario(args.scenario, args.scale)
    module: str | None = None
    with ExitStack() as stack:
        if "model" in config.sources:
            if args.drafter != "mtp":
                raise ConfigError("drafter", args.drafter, "a model of your own drafts with mtp")
            model = Path(config.model.model)
            module = config.get("spec_model")
        else:
            model = stack.enter_context(tiny_model(what.max_model_len))
        hang = Hang(what, model, args.drafter, settings, module=module)
        _say(what, args.policy, args.drafter)
        truth = hang.truth()
        print(f"without speculation: {sum(map(len, truth))} tokens", flush=True)
        outcome = hang.run(args.policy, truth)
    _report(outcome)
    if args.json is not None:
        args.json.write_text(json.dumps({"kind": "hang", **_fields(outcome)}, indent=1) + "\n")
    return 0 if outcome.good else 1


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {**asdict(outcome), "good": outcome.good}


def _say(what: Scenario, policy: str, drafter: str) -> None:
    lengths = ", ".join(f"{len(own)} × {own[0]}" for own in what.prompts)
    print(
        f"{what.name}, {policy}: dp={what.dp} tp={what.tp}, experts over all ranks, {drafter} with "
        f"3 drafts, max_model_len={what.max_model_len}\n"
        f"prompts by replica: {lengths}; outputs: {', '.join(map(str, what.outputs))}",
        flush=True,
    )


def _report(outcome: Outcome) -> None:
    if outcome.hung is not None:
        print(f"hangs; named {outcome.seconds_to_name:.1f} s after the last token:")
        print(f"{outcome.error}: {outcome.hung}")
        return
    lengths = ", ".join(f"{k}: {count}" for k, count in outcome.draft_lengths.items())
    print(
        f"completes: {outcome.steps} steps in {outcome.seconds:.0f} s; draft lengths {{{lengths}}}"
    )
    if outcome.gate_steps:
        print(f"the old gate would have skipped one drafter alone in {outcome.gate_steps} steps")
    same = "the same" if outcome.equal else "NOT the same"
    print(f"tokens: {same} as without speculation")
