"""``drumline bench overhead``: its table. What runs is `bench.overhead`'s."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from drumline.config.speculative import SHORTCUTS

if TYPE_CHECKING:
    from drumline.config import EngineConfig
    from drumline.engine.llm import LLM

COLUMNS = (
    *("requests", "draws", "plain step ms", "outside µs", "engine"),
    *("step ms", "verify µs", "propose µs", "speculation", "outside µs", "together"),
)


def run_overhead(
    args: argparse.Namespace, config: EngineConfig
) -> tuple[LLM, list[dict[str, Any]]]:
    """Prints the table; returns the engine without speculation and the figures."""
    from drumline.bench.latency import bench_config
    from drumline.bench.overhead import measure_overhead
    from drumline.engine.llm import LLM

    wide = bench_config(config, args.batch_size)
    plain = LLM.from_config(wide.with_fields(speculative_config=None, **dict.fromkeys(SHORTCUTS)))
    speculating = None if config.speculation is None else LLM.from_config(wide)
    found = measure_overhead(plain, speculating, args.batch_size, args.output_len, args.num_iters)
    columns = COLUMNS if speculating is not None else COLUMNS[:5]
    print(f"\n| {' | '.join(columns)} |")
    print("| ---: | --- |" + " ---: |" * (len(columns) - 2))
    for one in found:
        cells = [
            str(one.requests),
            one.draw,
            f"{one.plain.step * 1e3:.2f}",
            f"{one.plain.outside * 1e6:.0f}",
            f"{one.engine:.1%}",
        ]
        cost = one.speculating
        if cost is not None:
            cells += [
                f"{cost.step * 1e3:.2f}",
                f"{cost.verify * 1e6:.0f}",
                f"{cost.propose * 1e6:.0f}",
                f"{one.speculation:.1%}",
                f"{cost.outside * 1e6:.0f}",
                f"{one.together:.1%}",
            ]
        print(f"| {' | '.join(cells)} |")
    return plain, [one.as_json() for one in found]
