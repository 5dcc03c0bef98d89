#!/usr/bin/env python3
"""Many clients at once against `pagemill serve` with a KV pool that is too small for them: short and long prompts,
greedy and seeded sampling, several choices, streams that are dropped half-way. Every answer must equal the one that
the same request gets alone.

    python3 benches/soak/soak.py target/release/pagemill crates/testkit/zoo/llama --minutes 10
    python3 benches/soak/soak.py target/release/pagemill MODEL --minutes 3 -- --device cuda:0 --activations f32 \
        --kv-dtype f32

What follows `--` goes to `pagemill serve`. Prints one line a period and a verdict as JSON; exits non-zero at wrong
answers, errors, blocks that are not given back, memory that grows, or if nothing was preempted. On a GPU the last bits
of a row depend on the batch around it; with everything in f32, the cache too, that is too little to part texts but once
in very many tokens (a 16-bit cache rounds it up to what a draw notices). Only the standard library is used.
"""
import argparse
import json
import random
import sys
import threading
import time

from load import Client, Tally, make_requests
from server import Server

PERIOD_S = 10
# Anonymous memory may still grow by this between the run's middle and its end: buffers of the most unlucky step.
GROWTH_KIB_MAX = 32 * 1024


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=96, help="different requests")
    parser.add_argument("--kv-cache-bytes", default="2MiB")
    parser.add_argument("--seed", type=int, default=1)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.serve = sys.argv[at + 1:]
    return args


def soak(args, server):
    """Runs the load; the tally, and anonymous memory in KiB over time."""
    requests = make_requests(random.Random(args.seed), args.requests, server)
    started = time.time()
    alone = [server.complete(request) for request in requests]
    print(f"alone: {len(requests)} requests in {time.time() - started:.1f} s", flush=True)
    tally, memory = Tally(), []
    deadline = time.time() + args.minutes * 60
    clients = [Client(server, requests, alone, tally, deadline, args.seed * 1000 + i) for i in range(args.clients)]
    threads = [threading.Thread(target=client.run, daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(PERIOD_S / len(threads))
        memory.append(server.anonymous_kib())
        if not server.is_alive():
            tally.fail("the server ended")
            break
        print(f"{time.time() - started:6.0f} s  {tally}  {memory[-1]} KiB", flush=True)
    return tally, memory


def settle(server):
    """Waits until nothing runs: the last dropped streams are noticed within a step."""
    for _ in range(100):
        metrics = server.metrics()
        if not metrics["pagemill_num_requests_running"] and not metrics["pagemill_num_requests_waiting"]:
            break
        time.sleep(0.1)
    return server.metrics()


def main():
    args = arguments()
    flags = ["--kv-cache-bytes", args.kv_cache_bytes, *args.serve]
    with Server(args.binary, args.model, flags) as server:
        before = server.metrics()
        tally, memory = soak(args, server)
        faults = tally.faults[:8]
        preemptions = 0
        if server.is_alive():
            after = settle(server)
            preemptions = int(after["pagemill_num_preemptions_total"] - before["pagemill_num_preemptions_total"])
            for name in ("pagemill_num_requests_running", "pagemill_num_requests_waiting", "pagemill_kv_blocks_owned"):
                if after[name]:
                    faults.append(f"{name} is {after[name]:.0f} at the end")
            if server.get("/health")[0] != 200:
                faults.append("/health is not 200 at the end")
        if preemptions == 0:
            faults.append("nothing was preempted: the pool is too large for this load")
        growth = memory[-1] - memory[len(memory) // 2] if memory else 0
        if growth > GROWTH_KIB_MAX:
            faults.append(f"anonymous memory grew by {growth} KiB in the second half")
    if server.exit_code != 0:
        faults.append(f"the server exited with {server.exit_code}")
    verdict = {"passed": not faults, "minutes": args.minutes, "clients": args.clients, **tally.counts(),
               "preemptions": preemptions, "anonymous_kib": memory[-1:], "faults": faults}
    print(json.dumps(verdict))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
