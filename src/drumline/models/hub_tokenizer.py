"""Tokenizers of hub folders: tokenizer.json as it is, and what tokenizer_config.json adds.

Gives the ids that the fast tokenizers of ``transformers`` give. As there, the post-processor of
tokenizer.json alone decides whether BOS and EOS are added: ``add_bos_token`` and ``add_eos_token``
speak to slow tokenizers, and where they disagree with it they are out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from drumline.core.errors import CheckpointError
from drumline.models.config import Fields, read_json
from drumline.models.tokenizer import Tokenizer

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def hub_tokenizer(folder: Path) -> Tokenizer:
    """Reads ``tokenizer.json`` and, if there, ``tokenizer_config.json``,
    ``special_tokens_map.json`` and ``chat_template.jinja``. CheckpointError names what is wrong."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise CheckpointError(path, "no such file (slow tokenizers are not supported)")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(path, f"not a tokenizer: {' '.join(str(error).split())}") from None
    backend.no_truncation()
    backend.no_padding()

    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.exists() else {}
    try:
        named = _named_tokens(folder, settings)
        _add_tokens(backend, settings, named)
        special = {name: _content(token) for name, token in named.items()}
        templates = _chat_templates(folder, settings)
    except (TypeError, KeyError, AttributeError, UnicodeDecodeError) as error:
        problem = f"malformed: {type(error).__name__} {' '.join(str(error).split())}"
        raise CheckpointError(settings_path, problem) from None
    if Fields(settings_path, settings).flag("split_special_tokens"):
        backend.encode_special_tokens = True
    return Tokenizer(backend, path, special_tokens=special, chat_templates=templates)


def _named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Special tokens by name, from tokenizer_config.json or the older special_tokens_map.json."""
    older_path = folder / "special_tokens_map.json"
    older = read_json(older_path) if older_path.exists() else {}
    named = {name: settings.get(name) or older.get(name) for name in _NAMED}
    return {name: token for name, token in named.items() if token is not None}


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _added(token: Any, special: bool) -> AddedToken:
    if not isinstance(token, dict):
        return AddedToken(str(token), special=special, normalized=False)
    return AddedToken(
        str(token["content"]),
        special=special or bool(token.get("special", False)),
        lstrip=bool(token.get("lstrip", False)),
        rstrip=bool(token.get("rstrip", False)),
        single_word=bool(token.get("single_word", False)),
        normalized=bool(token.get("normalized", not special)),
    )


def _add_tokens(
    backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, Any]
) -> None:
    """Tokens that tokenizer_config.json knows and tokenizer.json does not."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder", {})
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if _content(token) not in present:
            backend.add_tokens([_added(token, special=False)])
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else list(extra)
    for token in [*named.values(), *extra]:
        if _content(token) not in present:
            backend.add_special_tokens([_added(token, special=True)])


def _chat_templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """``chat_template.jinja`` first, then the config's string or list of named ones."""
    templates: dict[str, str] = {}
    value = settings.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            templates[str(entry["name"])] = str(entry["template"])
    elif value is not None:
        raise CheckpointError(
            folder / "tokenizer_config.json", "chat_template: expected a string or a list"
        )
    beside = folder / "chat_template.jinja"
    older = folder / "chat_template.json"
    if beside.exists():
        templates["default"] = beside.read_text(encoding="utf-8")
    elif older.exists():
        template = read_json(older).get("chat_template")
        if not isinstance(template, str):
            raise CheckpointError(older, "chat_template: expected a string")
        templates["default"] = template
    return templates
