"""Between two vocabularies: which target tokens a draft model can say, and how it reads ours.

Token-level intersection (Timor et al. 2025, "Accelerating LLM inference with lossless speculative
decoding algorithms for heterogeneous vocabularies"): two tokens are one if they add the same bytes
to a text. Drafts come from the intersection alone; special tokens meet special tokens only, by
spelling, or by role (beginning and end of text).

    saying    draft ids and target ids of the intersection, ascending by target id
    reading   target id → draft id. A token that the draft model has not is read as the last
              piece of its text in the draft's own tokens, so that positions stay one to one:
              what comes next depends most on how a text ends. Without text: the draft's
              unknown, end or first token.

Knows tokenizers, not models.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.errors import ConfigError
from drumline.models.tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token")
_SUBSTITUTES = ("unk_token", "eos_token", "bos_token")


class VocabMap:
    """Maps target ids to draft ids and back. Made at load; reading fills a cache as it goes."""

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
    ) -> None:
        """Sizes are rows of the models' heads. ConfigError if no token is shared."""
        self._target = target
        self._draft = draft
        self._draft_size = draft_size
        pairs = _intersection(target, draft, target_size, draft_size)
        if not pairs:
            raise ConfigError(
                "speculative_config.use_heterogeneous_vocab",
                True,
                f"{draft.path} and {target.path} have no token in common",
            )
        self.target_ids: tuple[int, ...] = tuple(sorted(pairs))
        self.draft_ids: tuple[int, ...] = tuple(pairs[token] for token in self.target_ids)
        self._read: dict[int, int] = dict(pairs)
        known = [
            _special_id(draft, draft.special_tokens.get(name), draft_size) for name in _SUBSTITUTES
        ]
        self._substitute = next((token for token in known if token is not None), 0)

    @property
    def shared_count(self) -> int:
        """Tokens that both vocabularies have."""
        return len(self.target_ids)

    def read(self, target_id: int) -> int:
        """The draft id that stands for ``target_id`` in what the draft model reads."""
        found = self._read.get(target_id)
        if found is None:
            found = self._read[target_id] = self._last_piece(target_id)
        return found

    def read_all(self, target_ids: Sequence[int]) -> list[int]:
        return [self.read(token) for token in target_ids]

    def _last_piece(self, target_id: int) -> int:
        if target_id in self._target.special_ids:
            return self._substitute
        text = self._target.token_bytes(target_id).decode("utf-8", errors="ignore")
        pieces = self._draft.encode(text, add_special_tokens=False) if text else []
        return pieces[-1] if pieces and pieces[-1] < self._draft_size else self._substitute


def same_tokens(target: Tokenizer, draft: Tokenizer, size: int) -> bool:
    """Whether the first ``size`` ids mean the same bytes, and are special, in both."""
    inside = frozenset(range(size))
    return target.special_ids & inside == draft.special_ids & inside and all(
        target.token_bytes(token) == draft.token_bytes(token) for token in range(size)
    )


def _intersection(
    target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int
) -> dict[int, int]:
    """Target id → draft id, one to one."""
    ours, theirs = _by_bytes(target, target_size), _by_bytes(draft, draft_size)
    pairs = {ours[text]: theirs[text] for text in ours.keys() & theirs.keys()}
    ours, theirs = _specials(target, target_size), _specials(draft, draft_size)
    pairs |= {ours[text]: theirs[text] for text in ours.keys() & theirs.keys()}
    for role in _ROLES:
        mine = _special_id(target, target.special_tokens.get(role), target_size)
        other = _special_id(draft, draft.special_tokens.get(role), draft_size)
        if mine is None or other is None or mine in pairs or other in pairs.values():
            continue
        pairs[mine] = other
    return pairs


def _by_bytes(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    """The ordinary token of each byte string. Of several, the one that encoding gives (a
    vocabulary may have both a letter and its byte, and uses the letter), else the lowest."""
    found: dict[bytes, int] = {}
    doubled: dict[bytes, list[int]] = {}
    for token in range(size):
        text = tokenizer.token_bytes(token)
        if text and token not in tokenizer.special_ids:
            first = found.setdefault(text, token)
            if first != token:
                doubled.setdefault(text, [first]).append(token)
    for data, tokens in doubled.items():
        pieces = tokenizer.encode(data.decode("utf-8", errors="ignore"), add_special_tokens=False)
        if pieces and pieces[-1] in tokens:
            found[data] = pieces[-1]
    return found


def _specials(tokenizer: Tokenizer, size: int) -> dict[bytes, int]:
    return {tokenizer.token_bytes(i): i for i in sorted(tokenizer.special_ids) if i < size}


def _special_id(tokenizer: Tokenizer, text: str | None, size: int) -> int | None:
    return None if text is None else _specials(tokenizer, size).get(text.encode())
