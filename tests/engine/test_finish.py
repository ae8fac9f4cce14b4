"""Where requests end: ids and text at the same token, however the tokens were grouped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.params import SamplingParams
from drumline.core.request import Finish, FinishReason, Request, Verdict
from drumline.engine.finish import OutputJudge

EOS = 0
STOP_TOKEN = 1
PIECES = {10: "one ", 11: "two ", 12: "EN", 13: "D", 14: "ENDING", 15: "a", 16: "b", 17: "ab"}


class ByteDetokenizer:
    """Token 2 is special and silent; 256 + b is the byte b; other ids are pieces of text. An
    unfinished character waits."""

    def __init__(self) -> None:
        self._waiting = b""

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if token in (EOS, 2):
                continue
            piece = PIECES.get(token, f"<{token}>").encode()
            self._waiting += bytes([token - 256]) if token >= 256 else piece
            try:
                text += self._waiting.decode()
                self._waiting = b""
            except UnicodeDecodeError:
                continue
        return text

    def flush(self) -> str:
        text, self._waiting = self._waiting.decode(errors="replace"), b""
        return text


def make_request(number: int = 0, max_tokens: int = 16, **params: Any) -> Request:
    params.setdefault("max_tokens", max_tokens)
    stops = set(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos", False):
        stops.add(EOS)
    return Request(
        number,
        (5, 6),
        SamplingParams(**params),
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset(stops),
    )


def run(request: Request, groups: Sequence[Sequence[int]]) -> tuple[Verdict, list[int], list[str]]:
    """The last verdict, the kept ids, and the text delta after each judgement."""
    judge = OutputJudge()
    judge.start(request, ByteDetokenizer(), request.params.stop)
    kept: list[int] = []
    deltas: list[str] = []
    verdict = Verdict(0)
    for group in groups:
        verdict = judge.judge(request, len(kept), group)
        kept += group[: verdict.kept]
        deltas.append(judge.take_text(request.number))
        if verdict.reason is not None:
            break
    return verdict, kept, deltas


def test_it_is_what_the_scheduler_asks_for() -> None:
    finish: Finish = OutputJudge()
    assert isinstance(finish, OutputJudge)


RUN = (10, 11, STOP_TOKEN, 20, 21, 22)


@pytest.mark.parametrize(
    ("max_tokens", "kept", "reason", "stop_reason"),
    [
        (5, 3, FinishReason.STOP, STOP_TOKEN),
        (3, 3, FinishReason.STOP, STOP_TOKEN),
        (2, 2, FinishReason.LENGTH, None),
        (1, 1, FinishReason.LENGTH, None),
    ],
)
def test_a_stop_inside_the_limit_wins_and_beyond_it_the_limit(
    max_tokens: int, kept: int, reason: FinishReason, stop_reason: int | None
) -> None:
    """CASES 43: one accepted run holds the stop and crosses the limit."""
    request = make_request(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))
    verdict, ids, deltas = run(request, [RUN])
    assert verdict == Verdict(kept, reason, stop_reason)
    assert ids == list(RUN[:kept])
    assert "".join(deltas) == ("one two " if kept > 1 else "one ")


def test_eos_ends_without_a_stop_reason_and_without_text() -> None:
    verdict, ids, deltas = run(make_request(), [(10, EOS, 11)])
    assert verdict == Verdict(2, FinishReason.STOP, None)
    assert (ids, deltas) == ([10, EOS], ["one "])


def test_ignore_eos_goes_on_to_the_limit() -> None:
    verdict, ids, deltas = run(make_request(max_tokens=4, ignore_eos=True), [(10, EOS, 11, EOS)])
    assert verdict == Verdict(4, FinishReason.LENGTH)
    assert (len(ids), deltas) == (4, ["one two "])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_tokens_text_is_shown_only_if_asked(include: bool) -> None:
    request = make_request(stop_token_ids=(15,), include_stop_str_in_output=include)
    verdict, _, deltas = run(request, [(10, 15)])
    assert verdict == Verdict(2, FinishReason.STOP, 15)
    assert deltas == ["one a" if include else "one "]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("end", [0, 1, 2, 3])
def test_a_stop_string_over_two_tokens_ends_at_each_place_of_a_run(end: int, include: bool) -> None:
    """CASES 43: "END" is the tokens 12, 13, and 13 stands at place ``end`` of the accepted run."""
    tokens = [10, 11, 15] + [16] * end
    run_start = len(tokens) - end + 1  # the run begins so that its place `end` is token 13
    tokens = [*tokens, 12, 13, 20, 21, 22]
    request = make_request(stop=("END",), include_stop_str_in_output=include)
    verdict, ids, deltas = run(request, [tokens[:run_start], tokens[run_start : run_start + 6]])
    assert verdict == Verdict(end + 1, FinishReason.STOP, "END")
    assert ids == tokens[: tokens.index(13) + 1]
    assert "".join(deltas) == "one two a" + "b" * end + ("END" if include else "")


def test_text_after_the_stop_in_the_same_token_is_cut() -> None:
    for include, text in ((False, "one "), (True, "one END")):
        request = make_request(stop=("END",), include_stop_str_in_output=include)
        assert run(request, [(10, 14)])[2] == [text]


def test_text_waits_while_it_could_begin_a_stop_string() -> None:
    _, _, deltas = run(make_request(stop=("END",)), [(10,), (12,), (16,), (12,), (13,)])
    assert deltas == ["one ", "", "ENb", "", ""]
    _, _, deltas = run(
        make_request(stop=("END",), include_stop_str_in_output=True), [(10,), (12,), (13,)]
    )
    assert deltas == ["one ", "EN", "D"]


def test_what_waited_is_given_out_at_the_limit_and_at_eos() -> None:
    assert run(make_request(max_tokens=2, stop=("END",)), [(10, 12)])[2] == ["one EN"]
    assert run(make_request(stop=("END",)), [(10, 12), (EOS,)])[2] == ["one ", "EN"]


def test_the_stop_string_that_begins_first_wins_then_the_one_listed_first() -> None:
    verdict, _, deltas = run(make_request(stop=("D", "ND")), [(14,)])
    assert (verdict.stop_reason, deltas) == ("ND", ["E"])
    verdict, _, deltas = run(make_request(stop=("END", "ENDING")), [(14,)])
    assert (verdict.stop_reason, deltas) == ("END", [""])


def test_overlapping_beginnings_keep_the_longest() -> None:
    verdict, _, deltas = run(make_request(stop=("aab",)), [(15,), (15,), (15,), (16,)])
    assert deltas == ["", "", "a", ""]
    assert verdict.stop_reason == "aab"


def test_min_tokens_lets_early_stops_pass() -> None:
    """The first min_tokens outputs end nothing; a stop string may begin among them."""
    request = make_request(min_tokens=2, stop=("ab",), stop_token_ids=(STOP_TOKEN,))
    verdict, ids, deltas = run(request, [(15, 16, 10, 17)])
    assert verdict == Verdict(4, FinishReason.STOP, "ab")
    assert (len(ids), deltas) == (4, ["abone "])
    verdict, _, _ = run(request, [(EOS, STOP_TOKEN, 10, EOS)])
    assert verdict == Verdict(4, FinishReason.STOP)
    verdict, _, deltas = run(request, [(10, 15, 16)])
    assert (verdict.kept, verdict.stop_reason, deltas) == (3, "ab", ["one "])


def test_min_tokens_does_not_let_a_passed_stop_count_later() -> None:
    """ "ab" passed early and is still held as the beginning of "abab": it does not end later."""
    request = make_request(min_tokens=1, stop=("abab", "ab"))
    verdict, _, deltas = run(request, [(17,), (10,), (17,)])
    assert (verdict.kept, verdict.stop_reason) == (1, "ab")
    assert deltas == ["", "abone ", ""]


def test_unfinished_characters_wait_and_the_end_replaces_them() -> None:
    euro = [256 + byte for byte in "€".encode()]
    _, _, deltas = run(make_request(), [(10,), (euro[0],), (euro[1],), (euro[2], 10), (EOS,)])
    assert deltas == ["one ", "", "", "€one ", ""]
    _, _, deltas = run(make_request(max_tokens=2), [(10, euro[0])])
    assert deltas == ["one �"]
    verdict, ids, deltas = run(make_request(stop=("€",)), [(10, *euro, 10)])
    assert (verdict.stop_reason, len(ids), deltas) == ("€", 4, ["one "])


def test_without_a_detokenizer_there_are_only_ids() -> None:
    judge = OutputJudge()
    request = make_request()
    judge.start(request, None)
    assert judge.judge(request, 0, (10, 11)) == Verdict(2)
    assert judge.judge(request, 2, (EOS,)) == Verdict(1, FinishReason.STOP)
    assert judge.take_text(0) == ""
    with pytest.raises(AssertionError, match="stop strings need text"):
        judge.start(request, None, ("x",))


def test_an_aborted_request_gives_out_what_waited() -> None:
    judge = OutputJudge()
    request = make_request(stop=("END",))
    judge.start(request, ByteDetokenizer(), request.params.stop)
    judge.judge(request, 0, (10, 12))
    assert judge.take_rest(0) == "one EN"
    assert judge.take_rest(0) == ""
    judge.forget(0)
    judge.forget(0)


def test_tokens_are_judged_once_and_none_after_the_end() -> None:
    judge = OutputJudge()
    request = make_request()
    judge.start(request, ByteDetokenizer())
    judge.judge(request, 0, (10,))
    with pytest.raises(AssertionError, match="lost or judged twice"):
        judge.judge(request, 0, (10,))
    judge.judge(request, 1, (EOS,))
    with pytest.raises(AssertionError, match="has ended"):
        judge.judge(request, 2, (10,))


def test_requests_are_kept_apart() -> None:
    judge = OutputJudge()
    one, two = make_request(1, stop=("END",)), make_request(2)
    judge.start(one, ByteDetokenizer(), one.params.stop)
    judge.start(two, ByteDetokenizer())
    judge.judge(one, 0, (12,))
    judge.judge(two, 0, (12,))
    assert (judge.take_text(1), judge.take_text(2)) == ("", "EN")


_pieces = st.sampled_from([10, 12, 13, 14, 15, 16, 17, EOS, 2, *(256 + b for b in "é".encode())])
_stops = st.lists(st.sampled_from(["END", "a", "ab", "ba", "aab", "D", "é", "two"]), max_size=3)


@settings(max_examples=500, deadline=None)
@given(
    tokens=st.lists(_pieces, max_size=14),
    stops=_stops,
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    max_tokens=st.integers(4, 14),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_grouping_changes_nothing_and_text_agrees_with_a_plain_search(
    tokens: list[int],
    stops: list[str],
    include: bool,
    min_tokens: int,
    max_tokens: int,
    cuts: list[int],
) -> None:
    """One by one, all at once, and in any runs: same ids, reason and text. Without min_tokens the
    text is the whole text cut at its first stop string."""
    request = make_request(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(stops),
        include_stop_str_in_output=include,
    )
    borders = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    groups = [tokens[a:b] for a, b in pairwise(borders)]
    single, kept, deltas = run(request, [[token] for token in tokens])
    verdict, kept_in_runs, deltas_in_runs = run(request, groups)
    assert (verdict.reason, verdict.stop_reason) == (single.reason, single.stop_reason)
    assert kept_in_runs == kept
    assert "".join(deltas_in_runs) == "".join(deltas)
    if single.reason is None or min_tokens:
        return
    whole = ByteDetokenizer()
    text = whole.push([one for one in kept if one != EOS]) + whole.flush()
    if isinstance(single.stop_reason, str):
        start = min(text.find(stop) for stop in stops if stop in text)
        assert text.startswith(single.stop_reason, start)
        text = text[: start + len(single.stop_reason) if include else start]
    else:
        assert not any(stop in text for stop in stops)
    assert "".join(deltas) == text
