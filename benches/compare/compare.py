#!/usr/bin/env python3
"""Pagemill against llama.cpp on one machine: A B A B …, distinct random prompts, the same model file, the same number
of threads. Prints every pair and the median, least and most of the ratios; a ratio above 1 is in Pagemill's favour.

    python3 -m venv venv && venv/bin/pip install llama-cpp-python    # builds llama.cpp from source
    cargo build --release
    venv/bin/python benches/compare/compare.py MODEL.gguf [--pairs 5] [--threads 2] [--parts single,batch,…] [--full]

Parts:
    single    prefill of 512 tokens, decode of one sequence
    batch     total decode of 16 sequences after prompts of 128 tokens
    ready     process start to ready (for llama.cpp: loading only, without the interpreter's start)
    serve     requests 16 at a time, about 200 tokens in
    prefix    requests at once that share a long prefix: time to first token
    context   decode after 512 and 2,048 tokens of context (--full: 8,000 too)

Every part also compares the processes' peak resident memory; llama.cpp's has the Python interpreter in it. The Python
package brings no `llama-server`, and its own server (`llama_cpp.server`) answers one request at a time, so llama.cpp's
continuous batching is driven through its low-level API as its server does it: 16 slots, 512 tokens a step, decodes
first. That leaves out HTTP, tokenising and detokenising, which Pagemill's figures include.

The default sizes of `serve` and `prefix` are cut so that all takes a few minutes; --full takes the whole ones (64
requests; 16 sharing 1,500 tokens), which llama.cpp needs minutes a pair for. `--no-repack` switches llama.cpp's extra
weight buffers off, for machines on which its AMX path crashes; the output says so.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
PARTS = ["single", "batch", "ready", "serve", "prefix", "context"]
# Figures that are better when smaller.
SMALLER = ("ms", "s", "MB")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--pairs", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--parts", default=",".join(PARTS))
parser.add_argument("--full", action="store_true")
parser.add_argument("--pagemill", default=os.path.join(HERE, "../../target/release/pagemill"))
parser.add_argument("--no-repack", action="store_true")
parser.add_argument("--no-flash", action="store_true", help="llama.cpp without flash attention")
parser.add_argument("--json", metavar="FILE", help="write all figures there")
args = parser.parse_args()

SERVE = {"requests": 64, "concurrency": 16, "prompt": 200, "gen": 64} if args.full else {
    "requests": 16, "concurrency": 16, "prompt": 200, "gen": 32}
PREFIX = {"requests": 16, "concurrency": 16, "prompt": 32, "gen": 8, "shared": 1500} if args.full else {
    "requests": 6, "concurrency": 6, "prompt": 32, "gen": 8, "shared": 400}
CONTEXTS = [512, 2048, 8000] if args.full else [512, 2048]


def execute(command):
    """Standard output of a command, and its peak resident memory in MB."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    errors = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    output = process.stdout.read()
    reader.join()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{errors[0][-2000:]}")
    return output, usage.ru_maxrss / 1000


def peer(part, **flags):
    command = [sys.executable, os.path.join(HERE, "peer.py"), part, args.model, "--threads", str(args.threads),
               "--repack", str(int(not args.no_repack)), "--flash", str(int(not args.no_flash))]
    for name, value in flags.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    output, memory = execute(command)
    return json.loads(output.splitlines()[-1]) | {"memory MB": memory}


def bench(what, *flags):
    """A `pagemill bench` report."""
    output, memory = execute([args.pagemill, "bench", what, args.model, "--threads", str(args.threads), "--json",
                              *map(str, flags)])
    return json.loads(output), memory


def single(seed):
    report, memory = bench("latency", "--prompt-tokens", 512, "--gen-tokens", 96, "--runs", 1, "--seed", seed)
    row = report["rows"][0]
    ours = {"prefill tok/s": row["prefill_tok_s_median"], "decode tok/s": row["decode_tok_s_median"],
            "memory MB": memory}
    return ours, peer("single", prompt_tokens=512, gen_tokens=96)


def batch(seed):
    report, memory = bench("latency", "--prompt-tokens", 128, "--gen-tokens", 32, "--batch-size", 16, "--runs", 1,
                           "--seed", seed)
    ours = {"decode tok/s": report["rows"][0]["decode_tok_s_median"], "memory MB": memory}
    return ours, peer("batch", prompt_tokens=128, gen_tokens=32, sequences=16)


def ready(_seed):
    """From the start of the process until its health says so; then it is stopped."""
    start = time.perf_counter()
    process = subprocess.Popen([args.pagemill, "serve", args.model, "--port", "0", "--threads", str(args.threads),
                                "--max-batch-size", "16", "--max-seq-len", "1024"], stderr=subprocess.PIPE, text=True)
    first = process.stderr.readline()
    if "://" not in first:
        sys.exit(f"pagemill serve: {first}")
    address = first.split("://")[1].split(";")[0]
    for line in process.stderr:
        if line.startswith("ready"):
            break
    urllib.request.urlopen(f"http://{address}/health", timeout=10).read()
    seconds = time.perf_counter() - start
    process.terminate()
    process.stderr.read()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {"ready s": seconds, "memory MB": usage.ru_maxrss / 1000}, peer("ready")


def serving(seed, size):
    shared = size.get("shared", 0)
    flags = ["--requests", size["requests"], "--concurrency", size["concurrency"], "--prompt-tokens", size["prompt"],
             "--gen-tokens", size["gen"], "--shared-prefix", shared, "--seed", seed]
    report, memory = bench("serve", *flags)
    if report["errors"]:
        sys.exit(f"pagemill bench serve: {report['errors']} errors: {report['first_error']}")
    ours = {"requests/s": report["requests_per_s"], "TTFT P50 ms": report["ttft_ms"]["p50"],
            "TTFT P99 ms": report["ttft_ms"]["p99"], "inter-token P50 ms": report["inter_token_ms"]["p50"],
            "inter-token P99 ms": report["inter_token_ms"]["p99"], "memory MB": memory}
    theirs = peer("serve", requests=size["requests"], concurrency=size["concurrency"], prompt_tokens=size["prompt"],
                  gen_tokens=size["gen"], shared_prefix=shared)
    return ours, theirs


def serve(seed):
    return serving(seed, SERVE)


def prefix(seed):
    return serving(seed, PREFIX)


def context(seed):
    ours, memory = {}, 0.0
    for length in CONTEXTS:
        report, used = bench("latency", "--prompt-tokens", length, "--gen-tokens", 32, "--runs", 1, "--seed", seed)
        ours[f"decode at {length} tok/s"] = report["rows"][0]["decode_tok_s_median"]
        memory = max(memory, used)
    return ours | {"memory MB": memory}, peer("context", contexts=",".join(map(str, CONTEXTS)), gen_tokens=32)


def ratio(figure, ours, theirs):
    """Above 1: in Pagemill's favour."""
    ours, theirs = (theirs, ours) if figure.split(" ")[-1] in SMALLER else (ours, theirs)
    return ours / theirs if theirs else float("inf")


def run(part):
    pairs = []
    for pair in range(args.pairs):
        ours, theirs = globals()[part](pair + 1)
        pairs.append((ours, theirs))
        print(f"{part}, pair {pair + 1}: " + "; ".join(
            f"{name} {ours[name]:.4g} / {theirs[name]:.4g}" for name in ours), flush=True)
    summary = {}
    for name in pairs[0][0]:
        ratios = [ratio(name, a[name], b[name]) for a, b in pairs]
        summary[name] = {"pagemill": statistics.median(a[name] for a, _ in pairs),
                         "llama.cpp": statistics.median(b[name] for _, b in pairs), "ratios": ratios}
    return summary


def main():
    parts = args.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown or args.pairs < 1:
        sys.exit(f"--parts: {', '.join(sorted(unknown))}: must be of {', '.join(PARTS)}; --pairs at least 1")
    version, _ = execute([args.pagemill, "--version"])
    import llama_cpp
    print(f"{os.path.basename(args.model)}, {args.threads} threads, {args.pairs} pairs; {version.strip()} / "
          f"llama-cpp-python {llama_cpp.__version__}" + (" without extra weight buffers (--no-repack)"
                                                          if args.no_repack else "")
          + (", without flash attention" if args.no_flash else ", with flash attention"))
    print(f"serve {SERVE}, prefix {PREFIX}; llama.cpp through its low-level API: no HTTP, no text, "
          "and its memory with the interpreter's")
    start, results = time.perf_counter(), {part: run(part) for part in parts}
    print(f"\nafter {time.perf_counter() - start:.0f} s; medians, and the ratio's median (least to most), above 1 in "
          "Pagemill's favour")
    print("| part | figure | pagemill | llama.cpp | ratio |\n|---|---|---:|---:|---:|")
    for part, summary in results.items():
        for name, figure in summary.items():
            ratios = figure["ratios"]
            print(f"| {part} | {name} | {figure['pagemill']:.4g} | {figure['llama.cpp']:.4g} | "
                  f"{statistics.median(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f}) |")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"model": args.model, "threads": args.threads, "pairs": args.pairs, "results": results}, file)


if __name__ == "__main__":
    main()
