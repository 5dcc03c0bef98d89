#!/usr/bin/env python3
"""Pagemill against llama.cpp on one machine, alternating (A B A B …), distinct random prompts, the same model file and
thread count.

    python3 -m venv venv && venv/bin/pip install llama-cpp-python    # builds llama.cpp from source
    cargo build --release
    venv/bin/python benches/compare/compare.py MODEL.gguf [--pairs 5] [--threads 2]

Prints each pair and the median, least and most of the ratios. `--no-repack` switches llama.cpp's extra weight buffers
off, for machines on which its AMX path crashes.
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--prompt-tokens", type=int, default=512)
parser.add_argument("--gen-tokens", type=int, default=96)
parser.add_argument("--pagemill", default=os.path.join(os.path.dirname(__file__), "../../target/release/pagemill"))
parser.add_argument("--no-repack", action="store_true")
parser.add_argument("--llama", action="store_true", help=argparse.SUPPRESS)
args = parser.parse_args()


def llama_once():
    """One run of llama.cpp in a process of its own; prints JSON."""
    import llama_cpp
    import llama_cpp.llama_cpp as low
    if args.no_repack:
        defaults = low.llama_model_default_params

        def without_extra_buffers():
            params = defaults()
            params.use_extra_bufts = False
            return params
        low.llama_model_default_params = without_extra_buffers
        llama_cpp.llama_model_default_params = without_extra_buffers
    total = args.prompt_tokens + args.gen_tokens + 16
    model = llama_cpp.Llama(args.model, n_ctx=total, n_threads=args.threads, n_threads_batch=args.threads, n_batch=512,
                            n_ubatch=512, flash_attn=True, verbose=False)
    rng = random.Random()
    vocabulary = model.n_vocab()

    def prompt(length):
        return [rng.randrange(100, vocabulary - 100) for _ in range(length)]

    model.eval(prompt(args.prompt_tokens))
    model.reset()
    ids = prompt(args.prompt_tokens)
    start = time.perf_counter()
    model.eval(ids)
    prefill = len(ids) / (time.perf_counter() - start)
    start = time.perf_counter()
    for token in prompt(args.gen_tokens):
        model.eval([token])
    print(json.dumps({"prefill": prefill, "decode": args.gen_tokens / (time.perf_counter() - start)}))


def peer():
    command = [sys.executable, os.path.abspath(__file__), args.model, "--llama", "--threads", str(args.threads),
               "--prompt-tokens", str(args.prompt_tokens), "--gen-tokens", str(args.gen_tokens)]
    if args.no_repack:
        command.append("--no-repack")
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def ours(seed):
    command = [args.pagemill, "bench", "latency", args.model, "--threads", str(args.threads), "--prompt-tokens",
               str(args.prompt_tokens), "--gen-tokens", str(args.gen_tokens), "--runs", "1", "--seed", str(seed), "--json"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row = report["rows"][0]
    return {"prefill": row["prefill_tok_s_median"], "decode": row["decode_tok_s_median"], "device": report["device"]}


if args.llama:
    llama_once()
    sys.exit(0)
ratios = {"prefill": [], "decode": []}
for pair in range(args.pairs):
    a, b = ours(pair + 1), peer()
    if pair == 0:
        print(f"{args.model}: {args.prompt_tokens} prompt tokens, {args.gen_tokens} decoded, {args.threads} threads; "
              f"pagemill on {a['device']}")
    for what in ratios:
        ratios[what].append(a[what] / b[what])
    print(f"pair {pair + 1}: prefill {a['prefill']:.0f} / {b['prefill']:.0f} tok/s, decode {a['decode']:.1f} / "
          f"{b['decode']:.1f} tok/s (pagemill / llama.cpp)")
for what, values in ratios.items():
    print(f"{what}: {statistics.median(values):.2f}x (least {min(values):.2f}x, most {max(values):.2f}x)")
