"""Text ↔ token ids, and text out of a growing sequence of ids. No torch.

Encoding is done by the `tokenizers` library. Decoding is done here, by bytes: each token stands
for a byte string, a text is their concatenation read as UTF-8, and what is not UTF-8 reads as
U+FFFD. That makes decoding a fold over tokens, so that incremental and whole decoding agree by
construction.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from drumline.core.errors import CheckpointError, RequestError
from drumline.models.chat_template import ChatTemplates

_META = "▁"  # sentencepiece's mark for a space


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies (GPT-2) write bytes with → the bytes.

    Printable Latin-1 characters stand for themselves, the other 68 bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET: dict[str, int] = _byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer. Immutable once built; safe to share between threads.

    ``bos_token_id`` and ``eos_token_id`` are None where the checkpoint names none.
    ``special_ids`` are left out of decoded text unless asked for.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens`` maps names as templates know them (``bos_token``) to tokens."""
        self.path = path
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = ChatTemplates(path, chat_templates or {}, self.special_tokens)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in added.items() if token.special
        )
        self._byte_level, self._strip_start = _decoding_scheme(backend, path)
        self._texts: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {
            token_id: token.content.encode() for token_id, token in added.items()
        }
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        automatic = backend.encode("", add_special_tokens=True).ids
        self.adds_bos: bool = self.bos_token_id is not None and automatic[:1] == [self.bos_token_id]

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which a hub folder gives the same
        tokenizer, wherever this one came from."""
        self._backend.save(str(folder / "tokenizer.json"))
        sources = self.chat_templates.sources
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self._backend.encode_special_tokens:
            settings["split_special_tokens"] = True
        if list(sources) == ["default"]:
            settings["chat_template"] = sources["default"]
        elif sources:
            settings["chat_template"] = [
                {"name": name, "template": template} for name, template in sources.items()
            ]
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones included. A model may have more rows, which stand for no text."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer under another chat template (Jinja source)."""
        other = copy.copy(self)
        templates = {"default": source}
        other.chat_templates = ChatTemplates(self.path, templates, self.special_tokens)
        return other

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, with BOS or EOS if the checkpoint's tokenizer adds them.
        RequestError for text with lone surrogates, which is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text is not valid Unicode: lone surrogate at character {error.start}",
                param="prompt",
            ) from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; equals what an `IncrementalDetokenizer` gives in pieces."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to the text; empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if token_id >= 0 else None
            known = b"" if token is None else self._spelled(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str | None:
        """The characters that one token adds; None if its bytes are no whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text: str | None = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def _spelled(self, token: str) -> bytes:
        if self._byte_level:
            values = [BYTE_ALPHABET.get(char) for char in token]
            if None in values:
                return token.encode()
            return bytes(value for value in values if value is not None)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_META, " ").encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the checkpoint's template writes it. RequestError if it has none,
        or rejects the messages."""
        return self.chat_templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of the templated conversation. If the tokenizer adds BOS there is exactly one,
        whether or not the template writes it too; EOS is never appended."""
        text = self.apply_chat_template(messages, add_generation_prompt, tools, **template_kwargs)
        ids = self.encode(text, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids


class IncrementalDetokenizer:
    """Text out of ids that arrive bit by bit. The pieces of `push`, and `flush` at the end,
    concatenate to `Tokenizer.decode` of all ids.

    A character whose bytes are not all there yet is held back, never cut and never shown as
    U+FFFD; bytes that cannot become a character any more are shown as U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer._strip_start
        self._between = not self._at_start  # no bytes wait for others, and no space is dropped

    def push(self, ids: Iterable[int]) -> str:
        """The text that becomes certain with ``ids``; often empty."""
        ids = [i for i in ids if i not in self._skipped]
        if self._between:  # whole characters after whole characters need no decoder
            texts = [self._tokenizer.token_text(i) for i in ids]
            if None not in texts:
                return "".join(texts)  # type: ignore[arg-type]
        token_bytes = self._tokenizer.token_bytes
        data = b"".join(map(token_bytes, ids))
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        text = self._utf8.decode(data)
        self._between = not self._at_start and not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        """What is still held back, as U+FFFD. Afterwards the detokenizer starts a new text."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        self._at_start = self._tokenizer._strip_start
        self._between = not self._at_start
        return rest


def frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Makes ``backend`` put the tokens around every text that is encoded with special tokens."""
    tokens = [token for token in (bos, eos) if token is not None]
    before, after = ([f"{token}:0"] if token is not None else [] for token in (bos, eos))
    pair_before, pair_after = ([f"{token}:1"] if token is not None else [] for token in (bos, eos))
    single = [*before, "$A:0", *after]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *pair_before, "$B:1", *pair_after],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(tokens)],
    )


def _decoding_scheme(backend: tokenizers.Tokenizer, path: Path) -> tuple[bool, bool]:
    """(byte level, one leading space is dropped) of a tokenizer's decoder.

    Byte-level BPE and sentencepiece vocabularies are known; CheckpointError for another kind.
    """
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = state.get("decoders", [state]) if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _META:
        return False, steps[0].get("prepend_scheme") != "never"
    replace = {"type": "Replace", "pattern": {"String": _META}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    known = [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    if replace in steps and steps == [step for step in known if step in steps]:
        return False, strip in steps
    found = " + ".join(str(kind) for kind in kinds)
    raise CheckpointError(path, f"tokenizer decoder {found} is not supported")
