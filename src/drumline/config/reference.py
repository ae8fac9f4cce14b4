"""The page that lists every setting, written from the declarations: ``docs/configuration.md``.

``python -m drumline.config.reference > docs/configuration.md`` writes it; a test holds the two
together. It knows the table and refuses to know more than the table says.
"""

from __future__ import annotations

from drumline.config.arguments import TITLES
from drumline.config.fields import Field, Kind
from drumline.config.parts import FIELDS, PARTS
from drumline.config.refused import REFUSED
from drumline.config.sources import OTHER_VARIABLES
from drumline.config.speculative import KEYS, PREFIX
from drumline.config.speculative_refused import REFUSED_KEYS, REFUSED_METHODS, REFUSED_REJECTION

_HEAD = """\
# Configuration

Written by `python -m drumline.config.reference`; do not edit.

A setting has one name and four places. The first that names it wins: the flag, the environment
variable, the key in `--config FILE.yaml`, the default. In Python the name is a keyword of
`LLM(...)`, which reads no variables and no file.

    drumline serve --max-model-len 8K
    DRUMLINE_MAX_MODEL_LEN=8K drumline serve
    echo 'max-model-len: 8K' > serve.yaml && drumline serve --config serve.yaml
    LLM(max_model_len=8192)

Sizes may be written `8K` (times 1024) or `8k` (times 1000, decimals allowed); likewise `M`, `G`,
`T`. Switches have two flags, `--x` and `--no-x`. Names that do not exist are refused with the
nearest one that does.
"""

_SPECULATION_HEAD = """
## Keys of speculative_config

One JSON object (or YAML mapping, or Python dict), with vLLM's keys where it has them:
`{"method": "ngram", "num_speculative_tokens": 3}`. A key that means nothing to the method is
refused.

| key | values | default | |
| --- | --- | --- | --- |
"""

_SPECULATION_REFUSED_HEAD = """
Refused: methods and keys that people know and that this release does not honour.

| key or method | why |
| --- | --- |
"""

_REFUSED_HEAD = """
## Known and refused

These are settings of vLLM that this release does not honour. Asking for one is an error.

| setting | why |
| --- | --- |
"""


def page() -> str:
    """The whole page as Markdown text."""
    text = _HEAD
    for part in PARTS:
        text += f"\n## {TITLES[part][:1].upper()}{TITLES[part][1:]}\n\n"
        text += "| setting | flag | values | default | |\n| --- | --- | --- | --- | --- |\n"
        text += "".join(_row(field) for field in FIELDS.values() if field.part == part)
    text += _SPECULATION_HEAD
    for key in KEYS.values():
        cells = (f"`{key.name.removeprefix(PREFIX)}`", _values(key), _default(key), key.option.help)
        text += f"| {' | '.join(cells)} |\n"
    text += _SPECULATION_REFUSED_HEAD
    refused = REFUSED_METHODS | REFUSED_REJECTION | REFUSED_KEYS
    text += "".join(f"| `{name}` | {why} |\n" for name, why in refused.items())
    text += "\n## Other environment variables\n\n| variable | |\n| --- | --- |\n"
    text += "".join(f"| `{name}` | {words} |\n" for name, words in OTHER_VARIABLES.items())
    text += _REFUSED_HEAD
    return text + "".join(f"| `{name}` | {why} |\n" for name, why in sorted(REFUSED.items()))


def _row(field: Field) -> str:
    flag = f"`{field.flag}`" + (f" `{field.option.short}`" if field.option.short else "")
    cells = (f"`{field.name}`", flag, _values(field), _default(field), field.option.help)
    return f"| {' | '.join(cells)} |\n"


def _values(field: Field) -> str:
    option = field.option
    if option.kind is Kind.CHOICE:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.low is None:
        return option.kind.value
    unit = f" {option.unit}" if option.unit else ""
    return f"{option.low} to {option.high}{unit}"


def _default(field: Field) -> str:
    if field.option.when_none:
        return field.option.when_none
    if field.option.kind is Kind.SWITCH:
        return "on" if field.default else "off"
    return "none" if field.default == () else f"`{field.default}`"


if __name__ == "__main__":
    print(page(), end="")
