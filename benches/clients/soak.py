#!/usr/bin/env python3
"""Many clients at once against a KV pool that is too small for them: every answer must equal the one its prompt
gets alone, memory must stay flat, and the KV cache must be whole at the end.

    pagemill serve --port 8000 --kv-cache-bytes 96MiB --max-batch-size 64 &
    python3 benches/clients/soak.py http://127.0.0.1:8000 --clients 64 --minutes 3 --pid $!

Only the standard library is used.
"""
import argparse
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("base")
parser.add_argument("--clients", type=int, default=64)
parser.add_argument("--minutes", type=float, default=3)
parser.add_argument("--prompts", type=int, default=48)
parser.add_argument("--pid", type=int, help="the server's process id, to watch its memory")
args = parser.parse_args()
base = args.base.rstrip("/")
address = urllib.parse.urlparse(base)
words = ("time people year way day thing man world life hand part child eye woman place work week case point company "
         "number group problem fact river stone light garden letter engine page mill paper water market").split()


def make_prompts():
    rng = random.Random(7)
    shared = " ".join(rng.choice(words) for _ in range(150))
    prompts = []
    for i in range(args.prompts):
        own = " ".join(rng.choice(words) for _ in range(rng.randrange(5, 300)))
        prompts.append({"prompt": (shared + " " if i % 3 == 0 else "") + f"Story {i}: {own}",
                        "max_tokens": rng.randrange(16, 160), "temperature": 0 if i % 2 else 0.9, "seed": i,
                        "ignore_eos": True})
    return prompts


def post(connection, body):
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {data[:300]}")
    answer = json.loads(data)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def metrics():
    text = urllib.request.urlopen(base + "/metrics", timeout=30).read().decode()
    found = {}
    for line in text.splitlines():
        if not line.startswith("#") and line.strip():
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0) + float(value)
    return found


def resident_kib():
    if not args.pid:
        return 0
    for line in open(f"/proc/{args.pid}/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    return 0


prompts = make_prompts()
alone_connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
started = time.time()
alone = [post(alone_connection, p) for p in prompts]
print(f"alone: {len(prompts)} prompts in {time.time() - started:.1f} s")
before = metrics()
wrong, done, refused = [], [0], [0]
lock = threading.Lock()
deadline = time.time() + args.minutes * 60
samples = []


def client(seed):
    rng = random.Random(seed)
    while time.time() < deadline and not wrong:
        index = rng.randrange(len(prompts))
        if rng.random() < 0.1:
            abandon(prompts[index])
            continue
        # A connection a request: one kept over a long pause may be closed by the server, and rightly so.
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
        answer = post(connection, prompts[index])
        connection.close()
        with lock:
            done[0] += 1
            if answer != alone[index]:
                wrong.append((index, alone[index], answer))


def abandon(body):
    """A client that leaves in mid-stream."""
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read(random.randrange(1, 400))
    connection.sock.close()
    connection.close()
    with lock:
        refused[0] += 1


threads = [threading.Thread(target=client, args=(i,)) for i in range(args.clients)]
for thread in threads:
    thread.start()
while any(t.is_alive() for t in threads):
    time.sleep(5)
    samples.append(resident_kib())
for thread in threads:
    thread.join()
time.sleep(1)
after = metrics()
preempted = after["vllm:num_preemptions_total"] - before["vllm:num_preemptions_total"]
print(f"{args.clients} clients, {args.minutes} min: {done[0]} answers, {refused[0]} abandoned, {len(wrong)} wrong, "
      f"{preempted:.0f} preemptions, running {after['vllm:num_requests_running']:.0f}, "
      f"waiting {after['vllm:num_requests_waiting']:.0f}")
if samples and args.pid:
    half = len(samples) // 2
    print(f"anonymous memory KiB: first {samples[0]}, middle {samples[half]}, last {samples[-1]}")
print(f"health: {urllib.request.urlopen(base + '/health', timeout=10).status}")
if wrong:
    index, expected, got = wrong[0]
    print("first wrong answer:", index, "\nalone:", repr(expected), "\ngot:  ", repr(got))
sys.exit(1 if wrong or after["vllm:num_requests_running"] or after["vllm:num_requests_waiting"] else 0)
