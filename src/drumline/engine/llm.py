"""`LLM`: the engine in a script. Prompts in, `RequestOutput` values out, in input order."""

from __future__ import annotations

import operator
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import Any, Self

from drumline.config import EngineConfig
from drumline.core.errors import ConfigError, EngineError, Refused, RequestError
from drumline.core.params import SamplingParams
from drumline.engine.facts import make_intake
from drumline.engine.intake import Prompt, Submission
from drumline.engine.loading import load_core
from drumline.engine.outputs import OutputDelta, RequestOutput, RequestRecord
from drumline.models.tokenizer import Tokenizer

PromptLike = str | Prompt | Mapping[str, Any] | Sequence[int]


class Interrupt:
    """Turns Ctrl-C into a flag while the engine steps, so that no step is cut in half.

    The second Ctrl-C is not held back. Only Python's main thread gets signals; elsewhere, or under
    a handler that is not Python's, nothing is changed.
    """

    def __init__(self) -> None:
        self.raised = False

    @contextmanager
    def deferred(self) -> Iterator[Interrupt]:
        before = signal.getsignal(signal.SIGINT)
        if before is None or threading.current_thread() is not threading.main_thread():
            yield self
            return

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
        for name in settings:
            if name in EngineConfig.server_fields():
                raise ConfigError(name, settings[name], "is the server's; LLM has none")
        self._start(EngineConfig.from_kwargs(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.core = load_core(config)
        self.intake = make_intake(self.core.facts, self.core.tokenizer)
        self._busy = threading.Lock()

    def close(self) -> None:
        """Ends what was started for this model: with several ranks, their processes. It cannot be
        used afterwards. What is not closed ends with the script."""
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
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
        with closing(self.run(submissions, interrupt)) as deltas:
            for index, delta in deltas:
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
    ) -> Generator[tuple[int, OutputDelta], None, None]:
        """Feeds submissions as the queue has room and yields (index, delta) as steps bring them.

        After an interrupt everything is aborted, and each sample that was submitted still gets its
        last delta. Close the iterator if you leave it early: then nothing is left behind. Raises
        `Refused` while another call runs, `EngineError` after the last deltas of an engine that
        broke.
        """
        if not self._busy.acquire(blocking=False):
            raise Refused("this LLM is busy: one call at a time")
        try:
            with interrupt.deferred():
                yield from self._drive(submissions, interrupt)
        finally:
            self._abandon()
            self._busy.release()

    def _drive(
        self, submissions: Sequence[Submission], interrupt: Interrupt
    ) -> Iterator[tuple[int, OutputDelta]]:
        owner: dict[int, int] = {}
        waiting = deque(enumerate(submissions))
        told = False
        while waiting or self.core.has_work:
            if interrupt.raised and not told:
                told = True
                waiting.clear()
                self.core.cancel_all()
            while waiting and len(waiting[0][1].requests) <= self.core.room:
                index, submission = waiting.popleft()
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

    def _abandon(self) -> None:
        """Leaves no request behind, whatever ended the loop."""
        self.core.cancel_all()
        with suppress(EngineError):
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
        for own in each:
            if not isinstance(own, SamplingParams):
                raise RequestError(f"{own!r:.60} is no SamplingParams", param="sampling_params")
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
        names = ("prompt", "prompt_token_ids", "messages")
        for name in value:
            if name not in names:
                raise RequestError(f"unknown field; a prompt has {', '.join(names)}", param=name)
        ids, messages = value.get("prompt_token_ids"), value.get("messages")
        return Prompt(
            text=value.get("prompt"),
            token_ids=None if ids is None else _token_ids(ids),
            messages=None if messages is None else tuple(messages),
        )
    return Prompt(token_ids=_token_ids(value))


def _token_ids(value: Any) -> tuple[int, ...]:
    """Integers of any library; booleans are left for intake to refuse."""
    try:
        return tuple(item if isinstance(item, bool) else operator.index(item) for item in value)
    except TypeError:
        problem = f"{value!r:.60} is neither a text, nor token ids, nor a mapping"
        raise RequestError(problem, param="prompt") from None


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    if isinstance(prompts, str | Prompt | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"{prompts!r:.60} is no list of prompts", param="prompts")
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
