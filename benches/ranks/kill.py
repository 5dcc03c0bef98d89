#!/usr/bin/env python3
"""Kills a random rank of a serving world with SIGKILL, under load, again and again, and measures what follows.

    cargo build --release --features mpi
    python3 benches/ranks/kill.py target/release/pagemill MODEL [--rounds 20] [--tp 2] [--pp 2] [--plain]

For each round: seconds from the kill until every client had its error, until /health said 503 or the server was gone,
until every rank had ended, and until mpirun had, with its exit code. `--plain` leaves out what
docs/deploy.md tells to pass to mpirun. Exits non-zero if a client hung, an answer looked complete that was
not, an exit code was zero, or something took more than five seconds.
"""
import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import threading
import time

from world import GRACE, World

LIMIT = 5.0
CLIENTS = 8


class Client(threading.Thread):
    """Asks for long answers, streamed or not, until one fails; remembers how."""

    def __init__(self, world, index):
        super().__init__(daemon=True)
        self.world, self.index, self.is_stream = world, index, index % 2 == 0
        self.outcome, self.ended, self.answers = None, None, 0

    def run(self):
        while self.outcome is None:
            try:
                self.outcome = self.ask()
            except (OSError, http.client.HTTPException) as error:
                self.outcome = f"connection: {type(error).__name__}"
            if self.outcome is None:
                self.answers += 1
        self.ended = time.monotonic()

    def ask(self):
        connection = http.client.HTTPConnection(self.world.host, self.world.port, timeout=30)
        body = {"prompt": f"Story number {self.index} begins", "max_tokens": 400, "temperature": 0,
                "stream": self.is_stream, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status != 200:
            return f"status {answer.status} {json.loads(text)['error']['code']}"
        if not self.is_stream:
            return None
        if text.rstrip().endswith("data: [DONE]"):
            return None
        last = text.rstrip().rsplit("\n\n", 1)[-1]
        try:
            return f"event {json.loads(last.removeprefix('data: '))['error']['code']}"
        except (ValueError, KeyError):
            return f"a stream without an end: {last[-60:]!r}"


def is_running(pid):
    """Whether it runs still: a zombie has ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def seconds(value):
    return "never" if value is None else f"{value:.2f} s"


def one_round(options, number, rng):
    log = f"{options.logs}/round-{number}.log"
    mpirun = [*options.mpirun.split(), *([] if options.plain else GRACE)]
    world = World(options.binary, options.model, options.tp, options.pp, mpirun, log=log)
    try:
        ready = world.wait_ready()
        clients = [Client(world, index) for index in range(CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(rng.uniform(1.5, 3.0))
        ranks = world.ranks()
        assert sorted(ranks) == list(range(world.size)), f"ranks found: {ranks}"
        victim = rng.randrange(world.size) if options.rank is None else options.rank
        killed = time.monotonic()
        os.kill(ranks[victim], signal.SIGKILL)
        unhealthy = ranks_gone = None
        while time.monotonic() - killed < 3 * LIMIT:
            if unhealthy is None and world.health() != 200:
                unhealthy = time.monotonic() - killed
            if ranks_gone is None and not any(is_running(pid) for pid in ranks.values()):
                ranks_gone = time.monotonic() - killed
            if world.process.poll() is not None and not any(client.is_alive() for client in clients):
                break
            time.sleep(0.02)
        for client in clients:
            client.join(3 * LIMIT)
        code = world.wait(LIMIT)
        gone = time.monotonic() - killed
        left = world.ranks()
        hung = sum(client.is_alive() for client in clients)
        told = max((client.ended for client in clients if client.ended), default=killed) - killed
        outcomes = sorted({str(client.outcome) for client in clients})
        broken = [outcome for outcome in outcomes if outcome.startswith("a stream without")]
        good = (not hung and code not in (0, None) and not left and told < LIMIT and gone < LIMIT
                and None not in (unhealthy, ranks_gone) and (victim == 0 or not broken))
        print(f"round {number:2}: rank {victim} killed (ready after {ready:.1f} s): clients {told:.2f} s, "
              f"health {seconds(unhealthy)}, ranks gone {seconds(ranks_gone)}, mpirun {gone:.2f} s with {code}; "
              f"{'ok' if good else 'FAILED'}: {', '.join(outcomes)}" + (f"; hung {hung}; left {left}" if hung or left
                                                                         else ""), flush=True)
        return good, told, ranks_gone or 3 * LIMIT, gone
    finally:
        world.destroy()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--rank", type=int, help="always this one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--mpirun", default="", help="more words for mpirun")
    parser.add_argument("--logs", default="/tmp")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    results = [one_round(options, number, rng) for number in range(1, options.rounds + 1)]
    good, told, ranks_gone, gone = zip(*results)
    failed = good.count(False)
    span = lambda values: f"median {statistics.median(values):.2f} s, at most {max(values):.2f} s"
    print(f"{len(results)} kills, {failed} failed; until clients knew: {span(told)}; until the ranks had ended: "
          f"{span(ranks_gone)}; until mpirun had: {span(gone)}")
    sys.exit(1 if failed else 0)


main()
