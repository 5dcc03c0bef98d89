"""A `pagemill serve` of one's own, and its HTTP."""
import http.client
import json
import signal
import socket
import subprocess
import time

HOST = "127.0.0.1"
START_S, ANSWER_S, STOP_S = 120, 600, 60


class Server:
    """Runs between `with` and its end; `exit_code` afterwards."""

    def __init__(self, binary, model, flags):
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        self.command = [binary, "serve", model, "--host", HOST, "--port", str(self.port), *flags]
        self.exit_code = None

    def __enter__(self):
        self.process = subprocess.Popen(self.command)
        try:
            self.await_ready()
        except BaseException:
            self.process.kill()
            raise
        model = json.loads(self.get("/v1/models")[1])["data"][0]
        self.model, self.max_model_len = model["id"], model["max_model_len"]
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.exit_code = "no end in time"

    def await_ready(self):
        deadline = time.time() + START_S
        while time.time() < deadline and self.is_alive():
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"not ready: {' '.join(self.command)}")

    def is_alive(self):
        return self.process.poll() is None

    def anonymous_kib(self):
        try:
            with open(f"/proc/{self.process.pid}/status") as status:
                return next((int(line.split()[1]) for line in status if line.startswith("RssAnon")), 0)
        except OSError:
            return 0

    def connect(self):
        return http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)

    def get(self, path):
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def metrics(self):
        """Each metric summed over its labels."""
        found = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{")[0]
                found[name] = found.get(name, 0) + float(value)
        return found

    def tokens_a_word(self):
        body = {"model": self.model, "prompt": "river stone light garden letter engine page mill " * 2, "max_tokens": 1}
        return max(1.0, self.post(body, lambda r: json.loads(r.read()))["usage"]["prompt_tokens"] / 16)

    def post(self, body, read):
        """What `read` makes of the answer."""
        connection = self.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()[:300]}")
            return read(response)
        finally:
            connection.close()

    def complete(self, request):
        """(text, why it ended) of each choice."""
        answer = self.post(request, lambda response: json.loads(response.read()))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    def stream(self, request):
        """The same, put together from a stream."""
        def read(response):
            texts, ends = {}, {}
            for event in events(response):
                for choice in event["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + choice["text"]
                    ends[index] = choice["finish_reason"] or ends.get(index)
            return [(texts[index], ends[index]) for index in sorted(texts)]
        return self.post({**request, "stream": True}, read)

    def drop(self, request, after):
        """Begins a stream and leaves after that part of its events."""
        wanted = max(1, int(request["max_tokens"] * after))
        def read(response):
            for _, _ in zip(range(wanted), events(response)):
                pass
        self.post({**request, "stream": True}, read)


def events(response):
    """The events of a stream up to its `[DONE]`, without which it is no whole stream."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event
    raise RuntimeError("the stream ended without [DONE]")
