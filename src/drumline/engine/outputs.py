"""What a user gets back, under the names vLLM's users know. Values only; no engine state."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from drumline.core.plan import SpeculationStats
from drumline.core.request import FinishReason, PositionLogprobs
from drumline.engine.intake import Submission


class OutputDelta(Struct, frozen=True):
    """What one step added to one sample: the engine's unit of emission.

    ``text`` may lag behind ``token_ids``: a character whose bytes are not complete, or text that
    may yet turn out to be a stop string, is held back. The last delta has a finish reason.
    """

    number: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_token_count: int = 0
    error: str | None = None
    speculation: SpeculationStats | None = None  # with the end
    replica: int = 0  # that serves it


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. ``index`` counts the samples of a request; ``seed`` reproduces it.
    ``speculation``: what drafts brought it, where speculation is configured. ``replica``: which of
    several served it."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int
    error: str | None = None
    speculation: SpeculationStats | None = None
    replica: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of one prompt. ``prompt_logprobs`` starts with None: nothing precedes the first
    token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0


class SampleRecord:
    """Gathers the deltas of one sample until it is whole."""

    def __init__(self, number: int, index: int, seed: int, wants_logprobs: bool) -> None:
        self.number = number
        self.index = index
        self.seed = seed
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = [] if wants_logprobs else None
        self.prompt_logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.cached_token_count = 0
        self.error: str | None = None
        self.speculation: SpeculationStats | None = None
        self.replica = 0

    def add(self, delta: OutputDelta) -> None:
        assert self.finish_reason is None, f"sample {self.number} went on after its end"
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.cached_token_count = max(self.cached_token_count, delta.cached_token_count)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error
        self.speculation = delta.speculation
        self.replica = delta.replica

    def completion(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            error=self.error,
            speculation=self.speculation,
            replica=self.replica,
        )


class RequestRecord:
    """Gathers the samples of one request."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: tuple[int, ...],
        samples: list[SampleRecord],
        wants_prompt_logprobs: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.samples = samples
        self.wants_prompt_logprobs = wants_prompt_logprobs

    @classmethod
    def of(cls, submission: Submission) -> RequestRecord:
        params = submission.params
        samples = [
            SampleRecord(
                request.number, request.sample_index, request.seed, params.logprobs is not None
            )
            for request in submission.requests
        ]
        return cls(
            submission.request_id,
            submission.prompt,
            submission.prompt_token_ids,
            samples,
            params.prompt_logprobs is not None,
        )

    def sample(self, number: int) -> SampleRecord:
        """By the number of its request; a submission's numbers are consecutive."""
        return self.samples[number - self.samples[0].number]

    def add(self, delta: OutputDelta) -> None:
        self.sample(delta.number).add(delta)

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        first = self.samples[0]
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        if self.wants_prompt_logprobs:
            prompt_logprobs = (None, *first.prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=tuple(sample.completion() for sample in self.samples),
            finished=self.finished,
            num_cached_tokens=first.cached_token_count,
        )
