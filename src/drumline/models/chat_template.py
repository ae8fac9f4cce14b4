"""Chat templates: Jinja text from a checkpoint, rendered in a sandbox as transformers renders it.

A template is untrusted input. It sees plain JSON values only, in jinja2's immutable sandbox; it
can read no file and change none of its inputs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from drumline.core.errors import CheckpointError, RequestError


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks text of the assistant for training masks;
    for rendering it is its content, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it a set

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplates:
    """The templates of one checkpoint by name; ``default`` serves unless tools ask for
    ``tool_use``. ``variables`` (``bos_token`` and the like) are visible to each."""

    def __init__(
        self, path: Path, sources: Mapping[str, str], variables: Mapping[str, str]
    ) -> None:
        self.path = path
        self.sources = dict(sources)
        self.variables = dict(variables)
        self._compiled: dict[str, jinja2.Template] = {}

    def __bool__(self) -> bool:
        return bool(self.sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. A message's keys with value None count as absent.
        RequestError if the template rejects the messages or there is none, CheckpointError if
        the template itself cannot be parsed."""
        template = self._template("tool_use" if tools else "default")
        present = [{k: v for k, v in message.items() if v is not None} for message in messages]
        values = {
            **self.variables,
            "messages": present,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(template_kwargs or {}),
        }
        plain = {key: _plain(value) for key, value in values.items()}
        try:
            return template.render(plain)
        except Exception as error:  # whatever a template can do wrong is the request's error
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(f"the chat template says: {reason}", param="messages") from None

    def _template(self, name: str) -> jinja2.Template:
        if name not in self.sources:
            name = "default"
        if name not in self.sources:
            raise RequestError("the checkpoint has no chat template", param="messages")
        if name not in self._compiled:
            try:
                self._compiled[name] = _environment().from_string(self.sources[name])
            except jinja2.TemplateSyntaxError as error:
                problem = f"chat template, line {error.lineno}: {error.message}"
                raise CheckpointError(self.path, problem) from None
        return self._compiled[name]


def _plain(value: Any) -> Any:
    """A copy made of JSON's types alone, so that a template meets no object with methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            convert: Callable[[Any], Any] = kind
            return convert(value)
    raise RequestError(f"a {type(value).__name__} cannot go into a chat template", param="messages")
