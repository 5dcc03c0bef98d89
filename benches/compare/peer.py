"""llama.cpp's side of compare.py: one part in a process of its own; prints one JSON object. Uses the low-level API,
since the high-level one of llama-cpp-python runs one sequence at a time. Run by compare.py."""
import argparse
import collections
import ctypes
import json
import random
import time

import llama_cpp.llama_cpp as low
import numpy

BATCH = 512  # tokens of a step, as llama.cpp's own server has them


class Peer:
    """A model and a context for `sequences` sequences of `length` tokens each."""

    def __init__(self, path, threads, sequences, length, repack, flash):
        low.llama_log_set(self.quiet, ctypes.c_void_p())
        low.llama_backend_init()
        params = low.llama_model_default_params()
        params.use_extra_bufts = repack
        params.n_gpu_layers = 0
        self.model = low.llama_model_load_from_file(path.encode(), params)
        assert self.model, f"{path}: not loaded"
        settings = low.llama_context_default_params()
        settings.n_ctx = -(-length // 256) * 256 * sequences
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = threads
        settings.flash_attn_type = (low.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash
                                    else low.LLAMA_FLASH_ATTN_TYPE_DISABLED)
        settings.no_perf = True
        self.context = low.llama_init_from_model(self.model, settings)
        assert self.context, "no context"
        self.memory = low.llama_get_memory(self.context)
        self.num_vocab = low.llama_vocab_n_tokens(low.llama_model_get_vocab(self.model))
        self.batch = low.llama_batch_init(BATCH, 0, 1)
        self.random = random.Random()

    @low.llama_log_callback
    def quiet(level, text, user_data):
        pass

    def prompt(self, length):
        return [self.random.randrange(100, self.num_vocab - 100) for _ in range(length)]

    def step(self, tokens):
        """Computes (sequence, position, token, wants logits) entries, at most BATCH."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (sequence, position, token, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        code = low.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode: {code}"
        low.llama_synchronize(self.context)

    def best(self, i):
        """The likeliest token at entry i of the last step."""
        return int(numpy.argmax(numpy.ctypeslib.as_array(low.llama_get_logits_ith(self.context, i), (self.num_vocab,))))

    def prefill(self, sequence, start, tokens):
        last = len(tokens) - 1
        entries = [(sequence, start + i, token, i == last) for i, token in enumerate(tokens)]
        for i in range(0, len(entries), BATCH):
            self.step(entries[i:i + BATCH])

    def forget(self):
        low.llama_memory_clear(self.memory, True)


def single(args):
    """Prefill, then decode, of one sequence."""
    peer = Peer(args.model, args.threads, 1, args.prompt_tokens + args.gen_tokens, args.repack, args.flash)
    peer.prefill(0, 0, peer.prompt(args.prompt_tokens))
    peer.forget()
    ids = peer.prompt(args.prompt_tokens)
    start = time.perf_counter()
    peer.prefill(0, 0, ids)
    prefill = args.prompt_tokens / (time.perf_counter() - start)
    token = peer.best(len(ids[(len(ids) - 1) // BATCH * BATCH:]) - 1)
    start = time.perf_counter()
    for i in range(args.gen_tokens):
        peer.step([(0, args.prompt_tokens + i, token, True)])
        token = peer.best(0)
    return {"prefill tok/s": prefill, "decode tok/s": args.gen_tokens / (time.perf_counter() - start)}


def batch(args):
    """Total decode speed of `sequences` sequences."""
    peer = Peer(args.model, args.threads, args.sequences, args.prompt_tokens + args.gen_tokens, args.repack, args.flash)
    for sequence in range(args.sequences):
        peer.prefill(sequence, 0, peer.prompt(args.prompt_tokens))
    tokens = peer.prompt(args.sequences)
    start = time.perf_counter()
    for i in range(args.gen_tokens):
        peer.step([(s, args.prompt_tokens + i, token, True) for s, token in enumerate(tokens)])
        tokens = [peer.best(s) for s in range(args.sequences)]
    return {"decode tok/s": args.sequences * args.gen_tokens / (time.perf_counter() - start)}


def ready(args):
    """Loading, without the interpreter's own start: until one token is computed."""
    start = time.perf_counter()
    peer = Peer(args.model, args.threads, 16, 1024, args.repack, args.flash)
    peer.step([(0, 0, 100, True)])
    return {"ready s": time.perf_counter() - start}


def context(args):
    """Decode speed at each context length, one sequence that grows."""
    peer = Peer(args.model, args.threads, 1, max(args.contexts) + args.gen_tokens, args.repack, args.flash)
    at, figures = 0, {}
    for length in args.contexts:
        assert length > at, f"context {length}: must lie beyond the tokens decoded before, {at}"
        peer.prefill(0, at, peer.prompt(length - at))
        token, at = 100, length
        start = time.perf_counter()
        for _ in range(args.gen_tokens):
            peer.step([(0, at, token, True)])
            token, at = peer.best(0), at + 1
        figures[f"decode at {length} tok/s"] = args.gen_tokens / (time.perf_counter() - start)
    return figures


class Slot:
    """A sequence in flight."""

    def __init__(self, prompt, submitted):
        self.prompt, self.submitted, self.position, self.times, self.next = prompt, submitted, 0, [], None


def serve(args):
    """Continuous batching as llama.cpp's server does it: decodes first, prompts fill the step up to BATCH tokens, each
    slot its own; no HTTP and no text."""
    length = args.shared_prefix + args.prompt_tokens + args.gen_tokens
    peer = Peer(args.model, args.threads, args.concurrency, length, args.repack, args.flash)
    peer.prefill(0, 0, peer.prompt(32))
    peer.forget()
    prefix = peer.prompt(args.shared_prefix)
    waiting = collections.deque(prefix + peer.prompt(args.prompt_tokens) for _ in range(args.requests))
    slots, done = {}, []
    start = time.perf_counter()
    while waiting or slots:
        for sequence in range(args.concurrency):
            if waiting and sequence not in slots:
                low.llama_memory_seq_rm(peer.memory, sequence, -1, -1)
                slots[sequence] = Slot(waiting.popleft(), time.perf_counter())
        entries, sampled = [], []
        for sequence, slot in slots.items():
            if slot.next is not None:
                sampled.append((len(entries), sequence))
                entries.append((sequence, slot.position, slot.next, True))
                slot.position += 1
        for sequence, slot in slots.items():
            room = BATCH - len(entries)
            if slot.next is None and room > 0:
                chunk = slot.prompt[slot.position:slot.position + room]
                ends = slot.position + len(chunk) == len(slot.prompt)
                entries += [(sequence, slot.position + i, token, ends and i == len(chunk) - 1)
                            for i, token in enumerate(chunk)]
                slot.position += len(chunk)
                if ends:
                    sampled.append((len(entries) - 1, sequence))
        peer.step(entries)
        for i, sequence in sampled:
            slots[sequence].next = peer.best(i)
        now = time.perf_counter()
        for _, sequence in sampled:
            slots[sequence].times.append(now)
            if len(slots[sequence].times) == args.gen_tokens:
                done.append(slots.pop(sequence))
    wall = time.perf_counter() - start
    return serving_figures(done, wall)


def serving_figures(done, wall):
    first = sorted((slot.times[0] - slot.submitted) * 1e3 for slot in done)
    between = sorted((b - a) * 1e3 for slot in done for a, b in zip(slot.times, slot.times[1:]))
    return {"requests/s": len(done) / wall, "TTFT P50 ms": quantile(first, 0.5), "TTFT P99 ms": quantile(first, 0.99),
            "inter-token P50 ms": quantile(between, 0.5), "inter-token P99 ms": quantile(between, 0.99)}


def quantile(ordered, q):
    """Nearest rank, as `pagemill bench` has it."""
    return ordered[max(0, -int(-len(ordered) * q // 1) - 1)] if ordered else 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["single", "batch", "ready", "serve", "context"])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repack", type=int, default=1)
    parser.add_argument("--flash", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--gen-tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--contexts", type=lambda text: [int(n) for n in text.split(",")], default=[512])
    arguments = parser.parse_args()
    print(json.dumps(globals()[arguments.part](arguments)))
