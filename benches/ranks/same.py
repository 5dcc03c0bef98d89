#!/usr/bin/env python3
"""Serves MODEL once with ranks as threads of one process and once as processes under mpirun, asks both the same
questions at the same time, and compares the answers.

    cargo build --release --features mpi
    python3 benches/ranks/same.py target/release/pagemill MODEL... [--tp 2] [--pp 2] [--client openai_client.py]

`--client PYTHON` also runs benches/clients/openai_client.py with that interpreter (it needs the openai package)
against the processes. Exits non-zero at the first difference.
"""
import argparse
import concurrent.futures
import subprocess
import sys
import time

from world import ROOT, World, complete, free_port

PROMPTS = ["The capital of France is", "Once upon a time", "1 2 3 4", "def main():", "a", "The sky is blue because"]


def answers(base, num_tokens):
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(base, prompt, num_tokens), PROMPTS))


def threads(binary, model, tp, pp, num_tokens):
    port = free_port()
    command = [binary, "serve", model, "--tensor-parallel", str(tp), "--pipeline-parallel", str(pp), "--port",
               str(port), "--threads", str(tp * pp)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        base = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                return answers(base, num_tokens)
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"the server with threads ended with {server.returncode}: {server.stderr.read().decode()}")
                time.sleep(0.2)
        raise RuntimeError("the server with threads did not come up")
    finally:
        server.terminate()
        server.wait(30)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--client", help="a Python with the openai package")
    parser.add_argument("--mpirun", default="", help="more words for mpirun")
    parser.add_argument("--log", default="/tmp/same.log")
    options = parser.parse_args()
    for model in options.models:
        want = threads(options.binary, model, options.tp, options.pp, options.tokens)
        world = World(options.binary, model, options.tp, options.pp, options.mpirun.split(), log=options.log)
        try:
            ready = world.wait_ready()
            started = time.monotonic()
            found = answers(world.base, options.tokens)
            took = time.monotonic() - started
            if options.client:
                client = ROOT / "benches/clients/openai_client.py"
                subprocess.run([options.client, client, world.base], check=True)
            code = world.stop()
        finally:
            world.destroy()
        good = found == want and code == 0
        print(f"{model}: tp {options.tp} x pp {options.pp}: ready after {ready:.1f} s, {len(PROMPTS)} answers in "
              f"{took:.1f} s: {'the same as with threads' if found == want else 'DIFFERENT'}, exit {code}")
        if not good:
            if found == want:
                sys.exit(f"the server ended with {code}")
            for left, right in zip(want, found):
                print(f"  threads   {left!r}\n  processes {right!r}")
            sys.exit(1)


main()
