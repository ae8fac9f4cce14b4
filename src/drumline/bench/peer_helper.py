"""Runs another engine for `peers.Helper`: `python peer_helper.py NAME MODEL THREADS VOCABULARY`.

A program of its own, under the interpreter that has the engine's library; imports nothing of
drumline. Says {"ready": true}, then answers each JSON line of standard input with {"rate": …},
tokens per second, or {"error": …}. Each rate comes from two runs that differ in what is measured
alone, so that loading, tokenising and the prompt cancel.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], None]  # prompts, new tokens each; greedy, no early end


def open_transformers(model: str, threads: int) -> Generate:
    import os

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    if os.path.isfile(model):
        folder, file = os.path.split(os.path.abspath(model))
        network = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, torch_dtype=torch.float32
        )
    else:
        network = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    network.eval()  # type: ignore[no-untyped-call]

    def generate(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )

    return generate


def open_openvino(model: str, threads: int) -> Generate:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 2
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )

    def generate(prompts: list[list[int]], count: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.min_new_tokens = count
        config.ignore_eos = True
        tensors = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        pipeline.generate(tensors, [config] * len(prompts))

    return generate


def open_vllm(model: str, threads: int) -> Generate:
    import os

    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, max_model_len=2048, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine.generate(inputs, params, use_tqdm=False)

    return generate


OPENERS = {"transformers": open_transformers, "openvino": open_openvino, "vllm": open_vllm}


class Timer:
    """Times an engine on prompts that it has not seen."""

    def __init__(self, generate: Generate, vocabulary: int) -> None:
        self.generate = generate
        self.vocabulary = vocabulary
        self.calls = 0

    def seconds(self, streams: int, prompt: int, output: int) -> float:
        self.calls += 1
        prompts = [
            [
                (7919 * (row + 1) + 104729 * self.calls + 31 * at) % self.vocabulary
                for at in range(prompt)
            ]
            for row in range(streams)
        ]
        began = time.perf_counter()
        self.generate(prompts, output)
        return time.perf_counter() - began

    def decode(self, streams: int, prompt: int, output: int) -> float:
        short = self.seconds(streams, prompt, 1)
        return streams * (output - 1) / max(1e-9, self.seconds(streams, prompt, output) - short)

    def prefill(self, tokens: int) -> float:
        short = self.seconds(1, 8, 1)
        return (tokens - 8) / max(1e-9, self.seconds(1, tokens, 1) - short)


def answer(timer: Timer, question: dict[str, Any]) -> float:
    if "prefill" in question:
        return timer.prefill(int(question["prefill"]))
    work = question["decode"]
    return timer.decode(int(work["streams"]), int(work["prompt"]), int(work["output"]))


def main(name: str, model: str, threads: int, vocabulary: int) -> None:
    try:
        timer = Timer(OPENERS[name](model, threads), vocabulary)
        timer.seconds(1, 8, 2)  # first calls compile
        print(json.dumps({"ready": True}), flush=True)
    except Exception as error:  # whatever a library raises is the answer
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return
    for line in sys.stdin:
        try:
            print(json.dumps({"rate": answer(timer, json.loads(line))}), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
