"""Suffix decoding (Oliaro et al. 2024, "SuffixDecoding: a model-free approach to speeding up large
language model inference"): a trie of everything said, and how often what came next.

One trie per request holds its prompt and output, a global one the outputs of present and past
requests. For every length p at which the sequence's end stands in a trie, the most frequent
continuation is followed, at most ``factor * p`` tokens and while its probability (the product of
the shares of its steps) stays at ``min_token_prob`` or more. The candidate with the largest sum of
probabilities is drafted; at equal sums the longer match, and the request's own trie.

A trie is built where it is looked at. A suffix waits at a node until somebody wants to see what
follows there; then all that wait move on by one token:

    waiting at "a b"   (sequence 0, 2), (sequence 1, 7)
    looked at          "a b" → "c": (sequence 0, 3)        → "d": (sequence 1, 8)

Where one suffix waits alone, nobody has to move it: its sequence says what follows. So taking in
a token costs one entry, and nodes are made only for what is looked at and was said twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drumline.drafting.base import DrafterContext, DraftRow, Proposal
from drumline.drafting.host import HostDrafter, no_facts
from drumline.models.layers import ModelOutput

GLOBAL_TOKENS_MAX = 2**20  # outputs kept in the global trie, whatever the number of requests

facts = no_facts


def load(context: DrafterContext) -> SuffixDrafter:
    settings: Any = context.speculative
    return SuffixDrafter(
        depth=settings.suffix_decoding_max_tree_depth,
        cached_requests=settings.suffix_decoding_max_cached_requests,
        factor=settings.suffix_decoding_max_spec_factor,
        min_token_prob=settings.suffix_decoding_min_token_prob,
    )


Suffix = tuple[list[int], int]  # a sequence and the position of what follows


class Node:
    """A string that occurs: how often, what follows, and the suffixes that wait here."""

    __slots__ = ("best", "children", "count", "waiting")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node] = {}
        self.best = -1  # the most frequent next token, the lowest id of equals
        self.waiting: list[Suffix] = []

    def open(self) -> dict[int, Node]:
        """The next tokens, after moving on every suffix whose next token has come."""
        if not self.waiting:
            return self.children
        ended = []
        for suffix in self.waiting:
            tokens, position = suffix
            if position == len(tokens):
                ended.append(suffix)
                continue
            token = tokens[position]
            child = self.children.get(token)
            if child is None:
                child = self.children[token] = Node()
            child.count += 1
            child.waiting.append((tokens, position + 1))
            if self.best < 0 or (child.count, -token) > (
                self.children[self.best].count,
                -self.best,
            ):
                self.best = token
        self.waiting = ended
        return self.children

    @property
    def leaf(self) -> Suffix | None:
        """The one suffix that waits here, if nothing else was ever here."""
        return self.waiting[0] if self.count == 1 and self.waiting else None

    @property
    def continued(self) -> int:
        """Of its occurrences those that something follows; valid after `open`."""
        return self.count - len(self.waiting)


Place = Node | Suffix  # a node, or somewhere along the only suffix of a leaf


class SuffixTrie:
    """Every suffix of a growing set of growing sequences, to a depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node()

    def extend(self, sequence: list[int], tokens: Sequence[int]) -> None:
        """Appends to ``sequence``, which belongs to this trie alone."""
        first = len(sequence)
        sequence.extend(tokens)
        self.root.waiting.extend((sequence, at) for at in range(first, len(sequence)))
        self.root.count += len(tokens)

    def candidate(
        self, tokens: Sequence[int], k: int, factor: float, min_token_prob: float
    ) -> tuple[float, int, list[int]]:
        """(sum of probabilities, length of the match, drafts) for what may follow ``tokens``."""
        best: tuple[float, int, list[int]] = (0.0, 0, [])
        for size in range(1, min(self.depth - 1, len(tokens)) + 1):
            place = self._walk(tokens[len(tokens) - size :])
            if place is None:
                break  # where nothing follows, nothing follows a longer string either
            most = min(k, int(factor * size), self.depth - size)
            found = self._follow(place, most, min_token_prob)
            if found[0] and (found[0], size) >= best[:2]:
                best = (found[0], size, found[1])
        return best

    def _walk(self, tokens: Sequence[int]) -> Place | None:
        """Where the string ends in the trie; None if nothing follows it anywhere."""
        node = self.root
        for index, token in enumerate(tokens):
            if (leaf := node.leaf) is not None:
                return _beyond(leaf, tokens[index:])
            child = node.open().get(token)
            if child is None:
                return None
            node = child
        if (leaf := node.leaf) is not None:
            return _beyond(leaf, ())
        return node if node.open() else None

    def _follow(self, place: Place, most: int, min_token_prob: float) -> tuple[float, list[int]]:
        """The most frequent continuation, one token at a time."""
        drafts: list[int] = []
        total, probability = 0.0, 1.0
        while len(drafts) < most:
            leaf = place.leaf if isinstance(place, Node) else place
            if leaf is not None:  # the only one of its kind: it goes on as it went on
                sequence, position = leaf
                rest = sequence[position : position + most - len(drafts)]
                return total + probability * len(rest), drafts + rest
            assert isinstance(place, Node)
            children = place.open()
            if not children:
                break
            child = children[place.best]
            probability *= child.count / place.continued
            if probability < min_token_prob:
                break
            drafts.append(place.best)
            total += probability
            place = child
        return total, drafts


def _beyond(leaf: Suffix, tokens: Sequence[int]) -> Suffix | None:
    """The place after ``tokens``, if the leaf's sequence says just that and then goes on."""
    sequence, position = leaf
    end = position + len(tokens)
    return (sequence, end) if end < len(sequence) and sequence[position:end] == [*tokens] else None


class PastOutputs:
    """The global trie over outputs, the newest requests' only.

    When there are too many requests or tokens, the least recently extended quarter goes at once
    and the trie starts anew from the rest: entries are cheap, and removing single ones is not.
    """

    def __init__(self, depth: int, requests_max: int, tokens_max: int = GLOBAL_TOKENS_MAX) -> None:
        self.depth = depth
        self.requests_max = requests_max
        self.tokens_max = tokens_max
        self.trie = SuffixTrie(depth)
        self.token_count = 0
        self._outputs: dict[int, list[int]] = {}  # least recently extended first

    def __len__(self) -> int:
        return len(self._outputs)

    def follow(self, number: int, outputs: Sequence[int]) -> None:
        """Takes in what is new of the outputs of request ``number``."""
        kept = self._outputs.pop(number, None)
        kept = [] if kept is None else kept
        self._outputs[number] = kept
        new = outputs[len(kept) :]
        self.trie.extend(kept, new)
        self.token_count += len(new)
        if len(self._outputs) > self.requests_max or self.token_count > self.tokens_max:
            self._evict()

    def _evict(self) -> None:
        requests = self.requests_max - self.requests_max // 4
        tokens = self.tokens_max - self.tokens_max // 4
        kept: dict[int, list[int]] = {}
        count = 0
        for number, outputs in reversed(self._outputs.items()):
            if len(kept) == requests or count + len(outputs) > tokens:
                break
            kept[number] = outputs
            count += len(outputs)
        self._outputs = {number: kept[number] for number in reversed(kept)}
        self.token_count = count
        self.trie = SuffixTrie(self.depth)
        for number, outputs in self._outputs.items():
            fresh: list[int] = []
            self.trie.extend(fresh, outputs)
            self._outputs[number] = fresh


class SuffixDrafter(HostDrafter):
    """Drafts as far as what was said before makes it likely."""

    method = "suffix"

    def __init__(
        self, depth: int, cached_requests: int, factor: float, min_token_prob: float
    ) -> None:
        super().__init__()
        self.factor = factor
        self.min_token_prob = min_token_prob
        self.depth = depth
        self.past = PastOutputs(depth, cached_requests) if cached_requests else None
        self._own: dict[int, tuple[SuffixTrie, list[int]]] = {}

    def propose(
        self, rows: Sequence[DraftRow], output: ModelOutput | None, draft_k: int
    ) -> Proposal:
        """What is said is remembered, also by who may not draft."""
        if self.past is not None:
            for row in rows:
                if row.samples:
                    said = row.committed[len(row.request.prompt_token_ids) :]
                    self.past.follow(row.number, said)
        return super().propose(rows, output, draft_k)

    def draft(self, row: DraftRow) -> Sequence[int]:
        tokens = row.committed
        if row.number not in self._own:
            self._own[row.number] = (SuffixTrie(self.depth), [])
        trie, known = self._own[row.number]
        trie.extend(known, tokens[len(known) :])
        end = tokens[-self.depth :]
        best = trie.candidate(end, row.k, self.factor, self.min_token_prob)
        if self.past is not None:
            other = self.past.trie.candidate(end, row.k, self.factor, self.min_token_prob)
            best = max(best, other, key=lambda found: found[:2])  # the first of equals
        return best[2]

    def forget(self, number: int) -> None:
        self._own.pop(number, None)
