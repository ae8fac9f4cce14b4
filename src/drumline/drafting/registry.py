"""Which module drafts by which method. Explicit, imported on demand."""

from __future__ import annotations

import importlib
from typing import cast

from drumline.config import DrafterFacts, SpeculativeConfig
from drumline.config.speculative_methods import AUTO
from drumline.drafting.base import Drafter, DrafterContext, DrafterModule
from drumline.models.checkpoint import Checkpoint

MODULES: dict[str, str] = {
    "ngram": "drumline.drafting.ngram",
    "suffix": "drumline.drafting.suffix",
    "custom_class": "drumline.drafting.custom",
    "draft_model": "drumline.drafting.draft_model",
    "eagle": "drumline.drafting.eagle",
    "eagle3": "drumline.drafting.eagle3",
    "mtp": "drumline.drafting.mtp",
    "dflash": "drumline.drafting.dflash",
    "medusa": "drumline.drafting.medusa",
    "extract_hidden_states": "drumline.drafting.extract",
}


def drafter_module(method: str) -> DrafterModule:
    """The module with `facts` and `load` for a known method (else KeyError)."""
    return cast(DrafterModule, importlib.import_module(MODULES[method]))


def drafter_facts(
    speculative: SpeculativeConfig, checkpoint: Checkpoint, device: str = "cpu"
) -> DrafterFacts:
    """What `resolve` must know of the drafter that is asked for, or of the one that suits the
    target where that is left open; reads no weights. ``checkpoint`` is the target's, ``device``
    what is computed on. Raises `UsageError` for a draft checkpoint that is missing or does not
    fit."""
    reason = ""
    if speculative.method == AUTO:
        from drumline.drafting.auto import choose_method

        method, reason = choose_method(checkpoint)
        speculative = speculative.settled(method, device)
    found = drafter_module(speculative.method).facts(speculative, checkpoint)
    return DrafterFacts(**{"method": speculative.method, "reason": reason, **found})


def load_drafter(context: DrafterContext) -> Drafter:
    """The drafter that ``context.speculative.method`` names, behind a lookup if one is asked for.
    Raises `UsageError`."""
    settings = context.speculative
    drafter = drafter_module(settings.method).load(context)
    shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
    if settings.method == "ngram" or shortest is None or longest is None:
        return drafter
    from drumline.drafting.lookup import LookupFirst
    from drumline.drafting.ngram import NgramDrafter

    return LookupFirst(
        NgramDrafter(shortest, longest), drafter, context.ledger, settings.lookup_miss_tokens
    )
