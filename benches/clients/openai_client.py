#!/usr/bin/env python3
"""Drives a running Pagemill server with the `openai` package, as an application would.

    pip install openai
    pagemill serve --port 8000 &
    python3 benches/clients/openai_client.py http://127.0.0.1:8000

Prints one line a check and exits non-zero at the first that fails. Needs a model with a chat template.
"""
import json
import sys
import time
import urllib.request

import openai

base = sys.argv[1].rstrip("/") if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"
client = openai.OpenAI(base_url=base + "/v1", api_key=key, max_retries=0, timeout=120)
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]


def metric(name):
    text = urllib.request.urlopen(base + "/metrics", timeout=10).read().decode()
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)]
    assert values, f"no metric {name}"
    return sum(values)


def check(name, good, detail=""):
    print(("ok    " if good else "FAILED"), name, detail)
    if not good:
        sys.exit(1)


answer = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=40)
text = answer.choices[0].message.content
check("chat", bool(text.strip()) and answer.choices[0].finish_reason in ("stop", "length"), repr(text[:70]))
check("usage adds up", answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens)

chunks = list(client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=40,
                                             stream=True, stream_options={"include_usage": True}))
streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
check("stream equals non-stream", streamed == text)
check("stream usage", chunks[-1].usage is not None and chunks[-1].choices == []
      and chunks[-1].usage.completion_tokens == answer.usage.completion_tokens)
check("stream finish_reason", [c.choices[0].finish_reason for c in chunks if c.choices][-1]
      == answer.choices[0].finish_reason)

with_logprobs = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=5,
                                               logprobs=True, top_logprobs=3)
content = with_logprobs.choices[0].logprobs.content
check("logprobs", len(content) == 5 and all(len(c.top_logprobs) == 3 and c.logprob <= 0 for c in content)
      and "".join(c.token for c in content) == with_logprobs.choices[0].message.content)

several = client.chat.completions.create(model=model, messages=question, n=3, temperature=1.0, seed=7, max_tokens=12)
again = client.chat.completions.create(model=model, messages=question, n=3, temperature=1.0, seed=7, max_tokens=12)
check("n and seed", [c.index for c in several.choices] == [0, 1, 2]
      and [c.message.content for c in several.choices] == [c.message.content for c in again.choices])

echo = client.completions.create(model=model, prompt="The capital of France is", max_tokens=3, temperature=0, echo=True,
                                 logprobs=2)
check("completions echo and logprobs", echo.choices[0].text.startswith("The capital of France is")
      and echo.choices[0].logprobs.token_logprobs[0] is None)
batch = client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=4, temperature=0)
check("list of prompts", [c.index for c in batch.choices] == [0, 1])
stopped = client.completions.create(model=model, prompt="1 2 3 4 5 6", max_tokens=30, temperature=0, stop=[" 9"])
check("stop string", " 9" not in stopped.choices[0].text)


def refused(name, kind, **arguments):
    try:
        client.chat.completions.create(**{"model": model, "messages": question, **arguments})
    except kind as error:
        body = error.body if isinstance(error.body, dict) else {}
        check(f"refused: {name}", bool(body.get("message")), f"{error.status_code} {body.get('message', '')[:90]}")
        return
    check(f"refused: {name}", False, "was accepted")


refused("temperature", openai.BadRequestError, temperature=9)
refused("top_logprobs", openai.BadRequestError, logprobs=True, top_logprobs=21)
refused("unknown model", openai.NotFoundError, model="no-such-model")
refused("logit_bias", openai.BadRequestError, logit_bias={"99999999": 1})
refused("context length", openai.BadRequestError, messages=[{"role": "user", "content": "word " * 60000}])
refused("unsupported field", openai.BadRequestError, extra_body={"no_such_field": 1})

stream = client.completions.create(model=model, prompt="Once upon a time", max_tokens=2000, temperature=0, stream=True,
                                   extra_body={"ignore_eos": True})
next(iter(stream))
check("running while streaming", metric("vllm:num_requests_running") == 1)
stream.close()
deadline = time.time() + 2
while metric("vllm:num_requests_running") > 0 and time.time() < deadline:
    time.sleep(0.01)
check("disconnect frees the request", metric("vllm:num_requests_running") == 0)
final = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=40)
check("the same answer after all that", final.choices[0].message.content == text)
print(json.dumps({"model": model, "passed": True}))
