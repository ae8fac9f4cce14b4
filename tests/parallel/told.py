"""What a pass of a model issues to the other ranks, said from its configuration alone.

The engine learns it by looking (`drumline.worker.survey`); this is the other opinion, from reading
what `drumline.ops.sharded` does, and ledgers of real ranks are held to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.traits import Collective, ModelTraits, PerToken
from drumline.models.config import ArchitectureConfig
from drumline.parallel.shards import experts_max, vocabulary_width


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranks that share each layer, and ranks that experts are spread over (1: they are not).

    ``layers_shared`` is False for a drafter whose layers every rank computes whole, though it
    borrows an embedding and a head that are shared."""

    tp: int = 1
    ep: int = 1
    layers_shared: bool = True


def model_traits(config: ArchitectureConfig, spans: Spans) -> ModelTraits:
    """Of a target: embedding, layers, head. ``config`` is the whole checkpoint's."""
    return ModelTraits(
        body=(*embedding_issues(config.hidden_size, spans), *layer_issues(config, spans)),
        logits=head_issues(config.vocab_size, spans),
    )


def embedding_issues(hidden: int, spans: Spans) -> tuple[Collective, ...]:
    """Of looking up token ids in a table that the ranks share by rows."""
    return _sum(hidden) if spans.tp > 1 else ()


def head_issues(vocab: int, spans: Spans) -> tuple[Collective, ...]:
    """Of logits, each time that they are computed; as many rows as the replica's own ask for."""
    if spans.tp == 1:
        return ()
    return (Collective("all_gather", "tp", (None, vocabulary_width(vocab, spans.tp))),)


def layer_issues(config: ArchitectureConfig, spans: Spans) -> tuple[Collective, ...]:
    """Of all layers, in order."""
    issued: list[Collective] = []
    shared = _sum(config.hidden_size) if spans.tp > 1 and spans.layers_shared else ()
    for layer in range(config.num_hidden_layers):
        issued += shared  # attention
        issued += _experts(config, spans) if layer in config.expert_layers else shared
    return tuple(issued)


def _experts(config: ArchitectureConfig, spans: Spans) -> tuple[Collective, ...]:
    experts = config.experts
    assert experts is not None
    if spans.ep > 1:
        held = min(experts.per_token, experts_max(experts.count, spans.ep))
        out = (PerToken(), config.hidden_size + experts.per_token)
        back = (spans.ep, PerToken(), held, config.hidden_size)
        return (Collective("all_gather", "ep", out), Collective("all_to_all", "ep", back))
    if spans.tp == 1 or not spans.layers_shared:
        return ()
    together = _sum(config.hidden_size)
    return together * 2 if experts.shared_width else together  # and what all tokens share


def _sum(hidden: int) -> tuple[Collective, ...]:
    return (Collective("all_reduce", "tp", (PerToken(), hidden)),)
