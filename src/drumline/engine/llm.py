"""`LLM`: the engine in a script. Prompts in, `RequestOutput` values out, in input order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from drumline.config import EngineConfig
from drumline.core.errors import EngineError, RequestError
from drumline.core.params import SamplingParams
from drumline.engine.core import EngineCore
from drumline.engine.facts import make_intake
from drumline.engine.intake import Prompt, Submission
from drumline.engine.outputs import OutputDelta, RequestOutput, RequestRecord

PromptLike = str | Prompt | Mapping[str, Any] | Sequence[int]


class Interrupt:
    """Turns Ctrl-C into a flag while the engine steps, so that no step is cut in half.

    The second Ctrl-C is not held back. Only the main thread gets signals; elsewhere nothing is
    changed.
    """

    def __init__(self) -> None:
        self.raised = False

    @contextmanager
    def deferred(self) -> Iterator[Interrupt]:
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.getsignal(signal.SIGINT)

        def note(signum: int, frame: FrameType | None) -> None:
            self.raised = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


class LLM:
    """A loaded model.

        llm = LLM(model="smollm2")
        outputs = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))

    Keyword arguments are the engine's settings under their flag names (``max_num_seqs=32``).
    Raises `ConfigError` or `CheckpointError` for what cannot be had as asked.
    """

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        self._start(EngineConfig.from_kwargs(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.core = EngineCore.load(config)
        self.intake = make_intake(self.core.facts, self.core.tokenizer)

    @property
    def tokenizer(self) -> Any:
        return self.core.tokenizer

    def default_params(self) -> SamplingParams:
        """What is used where a call names no sampling parameters: the checkpoint's suggestions."""
        return self.core.facts.default_params

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt. A prompt is a text, a list of token ids, or a mapping with one
        of ``prompt``, ``prompt_token_ids`` and ``messages``; one `SamplingParams` for all, or one
        each. Raises `RequestError` before anything runs. Ctrl-C aborts what runs, then raises.
        """
        submissions = self.submissions(_as_list(prompts), sampling_params, priority)
        records = [RequestRecord.of(submission) for submission in submissions]
        interrupt = Interrupt()
        for index, delta in self.run(submissions, interrupt):
            records[index].add(delta)
        if interrupt.raised:
            raise KeyboardInterrupt
        return [record.output() for record in records]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the checkpoint's chat template."""
        if not messages:
            raise RequestError("a conversation needs at least one message", param="messages")
        many = not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if many else [messages]
        prompts = [Prompt(messages=tuple(conversation)) for conversation in conversations]
        return self.generate(prompts, sampling_params)

    def run(
        self, submissions: Sequence[Submission], interrupt: Interrupt
    ) -> Iterator[tuple[int, OutputDelta]]:
        """Feeds submissions as the queue has room and yields (index, delta) as steps bring them.

        After an interrupt, or if the caller stops iterating, everything is aborted; each sample
        that was submitted still gets its last delta in the first case.
        """
        owner: dict[int, int] = {}
        waiting = list(enumerate(submissions))[::-1]
        with interrupt.deferred():
            try:
                while waiting or self.core.has_work:
                    if interrupt.raised:
                        waiting.clear()
                        self.core.cancel_all()
                    while waiting and self._fits(waiting[-1][1]):
                        index, submission = waiting.pop()
                        self.core.submit(submission.requests)
                        owner |= {request.number: index for request in submission.requests}
                    try:
                        deltas = self.core.step()
                    except EngineError:
                        for delta in self.core.take_deltas():
                            yield owner[delta.number], delta
                        raise
                    for delta in deltas:
                        yield owner[delta.number], delta
            finally:
                self._abandon()

    def _fits(self, submission: Submission) -> bool:
        """A submission larger than the whole queue is tried when the engine is empty, and then
        refused by name."""
        return len(submission.requests) <= self.core.room or not self.core.has_work

    def _abandon(self) -> None:
        """Leaves no request behind, whatever ended the loop."""
        self.core.cancel_all()
        while self.core.has_work:
            self.core.step()

    def submissions(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[Submission]:
        """Intake for `run`: all prompts checked, none queued."""
        if params is None:
            params = self.default_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        ranks = [0] * len(prompts) if priority is None else list(priority)
        if not len(prompts) == len(each) == len(ranks):
            raise RequestError(
                f"{len(prompts)} prompts, {len(each)} sampling parameters and {len(ranks)} "
                "priorities do not belong together",
                param="prompts",
            )
        return [
            self.intake.admit(as_prompt(prompt), own, priority=rank)
            for prompt, own, rank in zip(prompts, each, ranks, strict=True)
        ]


def as_prompt(value: PromptLike) -> Prompt:
    """Reads what users write for a prompt. Raises `RequestError`."""
    if isinstance(value, Prompt):
        return value
    if isinstance(value, str):
        return Prompt(text=value)
    if isinstance(value, Mapping):
        names = {"prompt": "text", "prompt_token_ids": "token_ids", "messages": "messages"}
        for name in value:
            if name not in names:
                raise RequestError(f"unknown field; a prompt has {', '.join(names)}", param=name)
        given = {names[k]: v if k == "prompt" else tuple(v) for k, v in value.items()}
        return Prompt(**given)
    return Prompt(token_ids=tuple(value))


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    if isinstance(prompts, str | Prompt | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
