"""Wrong use, 100 kinds of it: one line on standard error that names it, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from server.running import command, environment


@dataclass(frozen=True)
class Files:
    """What the cases below refer to by name, as {model}, {folder} and so on."""

    model: Path
    folder: Path
    port: int


GENERATE = ["generate", "--model", "{model}", "--threads", "1", "--quiet"]
PROMPT = [*GENERATE, "--prompt", "a"]
SERVE = ["serve", "{model}", "--port", "0", "--threads", "1"]
TINY = ["tiny", "--output", "{folder}/out"]

# (what is typed, words that must stand in the line)
TYPED: dict[str, tuple[list[str], str]] = {
    # verbs and flags
    "unknown verb": (["genrate"], "'genrate'; did you mean 'generate'?"),
    "verb in capitals": (["SERVE"], "unknown verb 'SERVE'"),
    "flag before the verb": (["--model", "x"], "unknown verb '--model'"),
    "unknown flag": ([*PROMPT, "--temprature", "1"], "--temprature; did you mean --temperature?"),
    "unknown flag of serve": ([*SERVE, "--prot", "1"], "--prot; did you mean --port?"),
    "server flag of a script": ([*PROMPT, "--port", "1"], "unknown flag --port"),
    "sampling flag of the server": ([*SERVE, "--temperature", "1"], "unknown flag --temperature"),
    "flag without its value": ([*PROMPT, "--max-tokens"], "--max-tokens"),
    "stray argument": ([*SERVE, "two"], "'two'"),
    "abbreviated flag": ([*PROMPT, "--max-tok", "1"], "unknown flag --max-tok"),
    "flag of vLLM": ([*PROMPT, "--gpu-memory-utilization", "0.9"], "kv_cache_memory_bytes"),
    "another flag of vLLM": ([*SERVE, "--trust-remote-code"], "never run"),
    "short form of vLLM": ([*SERVE, "-asc", "2"], "-asc is refused"),
    # prompts
    "no prompt": (GENERATE, "--prompt"),
    "two sources": ([*PROMPT, "--prompts", "x"], "not allowed with"),
    "missing prompts file": ([*GENERATE, "--prompts", "{folder}/none"], "none: No such file"),
    "prompts file is a folder": ([*GENERATE, "--prompts", "{folder}"], "Is a directory"),
    "prompt not Unicode": ([*GENERATE, "--prompt", "\udcff"], "surrogate"),
    "prompt too long": ([*GENERATE, "--prompt", "a " * 600], "max_model_len=512"),
    "prompt far too long": ([*GENERATE, "--prompt", "a" * 200_000], "characters"),
    # sampling
    "negative temperature": ([*PROMPT, "--temperature", "-1"], "--temperature: -1.0"),
    "temperature nan": ([*PROMPT, "--temperature", "nan"], "--temperature: nan"),
    "temperature no number": ([*PROMPT, "--temperature", "hot"], "'hot' is not a number"),
    "top_p zero": ([*PROMPT, "--top-p", "0"], "--top-p: 0.0"),
    "top_k below": ([*PROMPT, "--top-k", "-2"], "--top-k: -2"),
    "min_p above": ([*PROMPT, "--min-p", "1.5"], "--min-p: 1.5"),
    "penalty out of range": ([*PROMPT, "--presence-penalty", "3"], "--presence-penalty: 3.0"),
    "repetition penalty zero": ([*PROMPT, "--repetition-penalty", "0"], "--repetition-penalty"),
    "max_tokens zero": ([*PROMPT, "--max-tokens", "0"], "--max-tokens: 0"),
    "max_tokens fraction": ([*PROMPT, "--max-tokens", "1.5"], "'1.5' is not an integer"),
    "min over max": ([*PROMPT, "--min-tokens", "9", "--max-tokens", "8"], "--min-tokens: 9"),
    "n zero": ([*PROMPT, "--n", "0"], "--n: 0"),
    "n too large": ([*PROMPT, "--n", "1000"], "--n: 1000"),
    "empty stop": ([*PROMPT, "--stop", ""], "--stop: an empty string"),
    "bias not JSON": ([*PROMPT, "--logit-bias", "x"], "--logit-bias"),
    "bias out of range": ([*PROMPT, "--logit-bias", '{"5": 101}'], "--logit-bias: 101"),
    "logprobs over the limit": ([*PROMPT, "--logprobs", "21"], "max_logprobs=20"),
    "whole vocabulary": ([*PROMPT, "--logprobs", "-1"], "max_logprobs=20"),
    "stop id outside": ([*PROMPT, "--stop-token-ids", "128"], "vocabulary of 128"),
    "allowed id outside": ([*PROMPT, "--allowed-token-ids", "5", "500"], "vocabulary of 128"),
    "bias id outside": ([*PROMPT, "--logit-bias", '{"500": 1}'], "vocabulary of 128"),
    # settings
    "setting no number": ([*PROMPT, "--max-num-seqs", "many"], "max_num_seqs='many'"),
    "setting below": ([*PROMPT, "--max-num-seqs", "0"], "max_num_seqs=0"),
    "length over the checkpoint": ([*PROMPT, "--max-model-len", "1K"], "at most 512 tokens"),
    "length not a size": ([*PROMPT, "--max-model-len", "1Q"], "max_model_len='1Q'"),
    "block size": ([*PROMPT, "--block-size", "3"], "power of two"),
    "cache too small": ([*PROMPT, "--kv-cache-memory-bytes", "16"], "kv_cache_memory_bytes=16"),
    "too many tensor ranks": ([*PROMPT, "-tp", "5"], "tensor_parallel_size=5"),
    "two stages": ([*PROMPT, "-pp", "2"], "pipeline_parallel_size=2"),
    "speculation no JSON": ([*PROMPT, "-sc", "{"], "speculative_config"),
    "speculation of no kind": ([*PROMPT, "-sc", '{"method": "psychic"}'], "specul"),
    "dtype of later": ([*PROMPT, "--dtype", "bfloat16"], "not in this release"),
    "dtype unknown": ([*PROMPT, "--dtype", "int3"], "dtype='int3'"),
    "device unknown": ([*PROMPT, "--device", "tpu"], "device='tpu'"),
    "policy unknown": ([*PROMPT, "--scheduling-policy", "lifo"], "scheduling_policy='lifo'"),
    "seed negative": ([*PROMPT, "--seed", "-1"], "seed=-1"),
    "watchdog unknown": ([*PROMPT, "--watchdog", "bite"], "watchdog='bite'"),
    "deadline zero": ([*PROMPT, "--step-timeout-seconds", "0"], "step_timeout_seconds"),
    "strict": ([*PROMPT, "--strict-config", "--threads", "500"], "strict_config=True"),
    "revision of a folder": ([*PROMPT, "--revision", "main"], "revision='main'"),
    # models
    "missing model": (["generate", "--model", "{folder}/none", "--prompt", "a"], "none: no such"),
    "no such alias": (["generate", "--model", "smollm9", "--prompt", "a"], "smollm9"),
    "empty model name": (["generate", "--model", "", "--prompt", "a"], "model=''"),
    "folder without a model": (["generate", "--model", "{folder}", "--prompt", "a"], "config.json"),
    "template missing": ([*PROMPT, "--chat-template", "{folder}/none"], "chat_template="),
    "template broken": ([*PROMPT, "--chat-template", "{folder}/broken.jinja"], "line 2"),
    # settings files
    "missing settings": ([*PROMPT, "--config", "{folder}/none"], "No such file"),
    # chat, serve, tiny, fetch, bench
    "chat with samples": (["chat", "--model", "{model}", "--n", "2"], "--n: a conversation"),
    "chat too hot": (["chat", "--model", "{model}", "--temperature", "-1"], "--temperature: -1"),
    "two models": ([*SERVE, "--model", "other"], "differ"),
    "missing model to serve": (["serve", "{folder}/none"], "none: no such file"),
    "port out of range": ([*SERVE[:2], "--port", "70000"], "port=70000"),
    "port in use": ([*SERVE[:2], "--port", "{port}"], "port={port}: cannot listen"),
    "no such host": ([*SERVE, "--host", "no.such.host.invalid"], "cannot be resolved"),
    "host not ours": ([*SERVE, "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
    "empty key": ([*SERVE, "--api-key", ""], "api_key='…'"),
    "body limit": ([*SERVE, "--max-body-bytes", "1"], "max_body_bytes=1"),
    "tiny without a kind": (TINY, "--arch"),
    "tiny of an unknown kind": ([*TINY, "--arch", "gpt5"], "gpt5"),
    "tiny rope no JSON": ([*TINY, "--arch", "llama", "--rope-scaling", "{"], "rope_scaling"),
    "tiny rope a list": ([*TINY, "--arch", "llama", "--rope-scaling", "[]"], "JSON object"),
    "tiny rope unknown": (
        [*TINY, "--arch", "llama", "--rope-scaling", '{"rope_type": "spiral"}'],
        "spiral",
    ),
    "tiny heads": ([*TINY, "--arch", "llama", "--heads", "3"], "heads"),
    "tiny vocabulary": ([*TINY, "--arch", "llama", "--vocab", "2"], "vocab"),
    "tiny no number": ([*TINY, "--arch", "llama", "--seed", "x"], "--seed"),
    "fetch what is not there": (["fetch", "./none"], "no such file"),
    "bench of nothing": (["bench", "speed"], "'speed'"),
    "bench negative": (["bench", "latency", "--input-len", "-1"], "input_len=-1"),
}

# What stands in the prompts file.
LINES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "no prompts in it"),
    "blank": (b"\n  \n", "no prompts in it"),
    "not UTF-8": (b'{"prompt": "a"}\n{"prompt": "\xff"}', "line 2: not UTF-8 at byte 12"),
    "not JSON": (b'{"prompt": "a"}\nhello', "line 2: not JSON"),
    "cut short": (b'{"prompt": "a', "line 1: not JSON"),
    "too deep": (b"[" * 100_000, "line 1: not JSON"),
    "a number of 5000 digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON"),
    "a list": (b'["a"]', "an object is needed, got list"),
    "no prompt": (b'{"max_tokens": 3}', "exactly one of prompt"),
    "two prompts": (b'{"prompt": "a", "prompt_token_ids": [5]}', "exactly one of prompt"),
    "prompt no text": (b'{"prompt": 5}', "prompt: 5 is not a text"),
    "ids no list": (b'{"prompt_token_ids": 5}', "prompt_token_ids: a list"),
    "ids of texts": (b'{"prompt_token_ids": ["5"]}', "'5' is not a token id"),
    "id outside": (b'{"prompt_token_ids": [128]}', "vocabulary of 128"),
    "messages no list": (b'{"messages": "hi"}', "messages: a list"),
    "messages without a role": (b'{"messages": [{"content": "hi"}]}', "needs a role"),
    "unknown key": (b'{"prompt": "a", "temprature": 1}', "temprature: unknown parameter; did"),
    "wrong type": (b'{"prompt": "a", "temperature": "hot"}', "temperature: 'hot'"),
    "out of range": (b'{"prompt": "a", "top_p": 2}', "top_p: 2 is out of range"),
    "stop no text": (b'{"prompt": "a", "stop": [5]}', "stop: (5,) is not a list of strings"),
    "seed too large": (b'{"prompt": "a", "seed": 1e30}', "seed: 1e+30"),
    "priority no integer": (b'{"prompt": "a", "priority": "high"}', "priority: 'high'"),
    "top_logprobs alone": (b'{"prompt": "a", "top_logprobs": 2}', "top_logprobs: needs logprobs"),
    "two names": (b'{"prompt": "a", "max_tokens": 1, "max_completion_tokens": 1}', "another name"),
    "a surrogate": (b'{"prompt": "\\ud800"}', "line 1: prompt: text is not valid Unicode"),
    "a later line too long": (b'{"prompt": "a"}\n{"prompt": "' + b"a " * 600 + b'"}', "line 2"),
}

SETTINGS: dict[str, tuple[bytes, str]] = {
    "not YAML": (b"a: [1", "is not YAML"),
    "not UTF-8": (b"\xff\xff: 1", "is not UTF-8"),
    "a list": (b"- 1", "must be a mapping"),
    "unknown key": (b"max_num_seq: 2", "did you mean max_num_seqs"),
    "wrong type": (b"max_num_seqs: two", "max_num_seqs='two'"),
    "refused key": (b"swap_space: 4", "swap_space"),
    "twice": (b"seed: 1\nseed: 2", "twice"),
}

VARIABLES: dict[str, tuple[str, str, str]] = {
    "unknown": ("DRUMLINE_MAX_NUM_SEQ", "2", "did you mean max_num_seqs"),
    "wrong type": ("DRUMLINE_MAX_NUM_SEQS", "two", "max_num_seqs='two'"),
    "empty": ("DRUMLINE_SEED", "", "must not be empty"),
}


@pytest.fixture(scope="module")
def files(tiny_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        folder = tmp_path_factory.mktemp("refusals")
        (folder / "broken.jinja").write_text("{% if messages %}\n{{ messages[0]")
        yield Files(tiny_path(), folder, taken.getsockname()[1])


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DRUMLINE_") and name != "DRUMLINE_CACHE":
            monkeypatch.delenv(name)


def assert_refused(
    capsys: pytest.CaptureFixture[str], files: Files, arguments: list[str], words: str
) -> None:
    def filled(text: str) -> str:
        text = text.replace("{model}", str(files.model)).replace("{folder}", str(files.folder))
        return text.replace("{port}", str(files.port))

    code = main([filled(argument) for argument in arguments])
    shown = capsys.readouterr()
    assert code == 2, shown.err
    assert shown.out == ""
    assert shown.err.count("\n") == 1, shown.err
    assert filled(words) in shown.err
    assert "Traceback" not in shown.err


@pytest.mark.parametrize("kind", TYPED)
def test_what_is_typed_wrongly(kind: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, files, *TYPED[kind])


@pytest.mark.parametrize("kind", LINES)
def test_wrong_prompts_files(kind: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = LINES[kind]
    path = files.folder / "prompts.jsonl"
    path.write_bytes(content)
    assert_refused(capsys, files, [*GENERATE, "--prompts", str(path)], words)


@pytest.mark.parametrize("kind", SETTINGS)
def test_wrong_settings_files(kind: str, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    content, words = SETTINGS[kind]
    path = files.folder / "settings.yaml"
    path.write_bytes(content)
    assert_refused(capsys, files, [*PROMPT, "--config", str(path)], words)


@pytest.mark.parametrize("kind", VARIABLES)
def test_wrong_variables(
    kind: str,
    files: Files,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, value, words = VARIABLES[kind]
    monkeypatch.setenv(name, value)
    assert_refused(capsys, files, PROMPT, words)


def damage(folder: Path, kind: str) -> None:
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    if kind == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "empty weights":
        weights.write_bytes(b"")
    elif kind == "missing weights":
        weights.unlink()
    elif kind == "wrong tensor shape":
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 65}))
    elif kind == "unknown architecture":
        changed = {**config, "model_type": "gpt5", "architectures": ["GPT5ForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(changed))
    elif kind == "config not JSON":
        (folder / "config.json").write_text("{")
    elif kind == "missing tokenizer":
        (folder / "tokenizer.json").unlink()
    else:
        assert kind == "no chat template"
        for file in folder.glob("chat_template*"):
            file.unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


MODELS = {
    "truncated weights": "model.safetensors",
    "empty weights": "model.safetensors",
    "missing weights": "safetensors",
    "wrong tensor shape": "has shape",
    "unknown architecture": "gpt5",
    "config not JSON": "config.json",
    "missing tokenizer": "tokenizer.json",
    "no chat template": "no chat template",
}


@pytest.mark.parametrize("kind", MODELS)
def test_damaged_models(
    kind: str, files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(files.model, folder)
    damage(folder, kind)
    arguments = ["generate", "--model", str(folder), "--prompt", "a", "--chat", "--quiet"]
    assert_refused(capsys, files, [*arguments, "--threads", "1"], MODELS[kind])


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"no model"])
def test_damaged_gguf_files(
    content: bytes, files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert_refused(capsys, files, ["generate", "--model", str(path), "--prompt", "a"], "model.gguf")


@pytest.mark.model
def test_a_truncated_download(
    smollm2_path: Path, files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "half.gguf"
    with smollm2_path.open("rb") as whole:
        path.write_bytes(whole.read(50_000_000))
    assert_refused(capsys, files, ["generate", "--model", str(path), "--prompt", "a"], "half.gguf")


@pytest.mark.parametrize(
    "kind", ["unknown flag", "negative temperature", "missing model", "prompt not Unicode"]
)
def test_the_process_says_it_in_one_line_too(kind: str, files: Files) -> None:
    arguments, words = TYPED[kind]
    filled = [
        argument.replace("{model}", str(files.model)).replace("{folder}", str(files.folder))
        for argument in arguments
    ]
    if kind == "prompt not Unicode":
        filled[-1] = os.fsdecode(b"\xff")
    run = subprocess.run(
        command(*filled), capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert words in run.stderr
