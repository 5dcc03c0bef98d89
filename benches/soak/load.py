"""The requests of a soak and the clients that send them."""
import random
import threading
import time

WORDS = ("time people year way day thing man world life hand part child eye woman place work week case point company "
         "number group problem fact river stone light garden letter engine page mill paper water market").split()
# Streams that their client leaves half-way.
DROPPED = 0.12
STREAMED = 0.4
FAULTS_MAX = 20


def make_requests(rng, count, server):
    """`count` different requests whose lengths are parts of the context that the server has."""
    context = server.max_model_len
    tokens_a_word = server.tokens_a_word()
    words = lambda tokens: " ".join(rng.choice(WORDS) for _ in range(max(1, int(tokens / tokens_a_word))))
    shared = words(context * 0.15)
    requests = []
    for index in range(count):
        is_long = index % 4 == 0
        tokens = context * (rng.uniform(0.3, 0.55) if is_long else rng.uniform(0.01, 0.12))
        prompt = f"Story {index}: {words(tokens)}"
        if index % 3 == 0:
            prompt = f"{shared} {prompt}"
        request = {"model": server.model, "prompt": prompt, "ignore_eos": True,
                   "max_tokens": max(4, int(context * rng.uniform(0.02, 0.2)))}
        if index % 2:
            request["temperature"] = 0
        else:
            request |= {"temperature": 0.9, "seed": index, "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 40])}
        if index % 7 == 0:
            request["n"] = 2
        requests.append(request)
    return requests


class Tally:
    """What came of the requests, over all clients."""

    def __init__(self):
        self.lock = threading.Lock()
        self.answers = self.streamed = self.dropped = self.wrong = self.errors = 0
        self.faults = []

    def count(self, **what):
        with self.lock:
            for name, number in what.items():
                setattr(self, name, getattr(self, name) + number)

    def fail(self, text):
        with self.lock:
            if len(self.faults) < FAULTS_MAX:
                self.faults.append(text)

    def counts(self):
        return {name: getattr(self, name) for name in ("answers", "streamed", "dropped", "wrong", "errors")}

    def __str__(self):
        return " ".join(f"{name} {count}" for name, count in self.counts().items())


class Client:
    """Sends requests one after the other, in an order of its own, and compares."""

    def __init__(self, server, requests, alone, tally, deadline, seed):
        self.server, self.requests, self.alone, self.tally = server, requests, alone, tally
        self.deadline, self.rng = deadline, random.Random(seed)

    def run(self):
        while time.time() < self.deadline and self.server.is_alive():
            index = self.rng.randrange(len(self.requests))
            try:
                self.send(index)
            except Exception as error:  # whatever it is, it is the soak's to report
                self.tally.count(errors=1)
                self.tally.fail(f"request {index}: {error!r}")

    def send(self, index):
        request, kind = self.requests[index], self.rng.random()
        if kind < DROPPED:
            self.server.drop(request, after=self.rng.uniform(0.05, 0.8))
            self.tally.count(dropped=1)
            return
        is_streamed = kind < DROPPED + STREAMED
        answer = self.server.stream(request) if is_streamed else self.server.complete(request)
        self.tally.count(answers=1, streamed=int(is_streamed))
        if answer != self.alone[index]:
            self.tally.count(wrong=1)
            self.tally.fail(f"request {index}: {difference(self.alone[index], answer)}")


def difference(alone, now):
    """Where two answers part."""
    if [end for _, end in alone] != [end for _, end in now]:
        return f"ended {[end for _, end in now]}, alone {[end for _, end in alone]}"
    for choice, ((expected, _), (got, _)) in enumerate(zip(alone, now)):
        if expected != got:
            at = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))
            return f"choice {choice} at {at} of {len(expected)}: {got[at:at + 40]!r}, alone {expected[at:at + 40]!r}"
    return "the same choices in another form"
