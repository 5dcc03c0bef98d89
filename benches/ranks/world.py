"""A Pagemill server over processes for the scripts beside this one: starts mpirun, waits until it serves, finds
its ranks, and makes the system look like two hosts. Standard library only."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: Gives the survivors of a rank two seconds instead of one until mpirun's SIGTERM, and two more until its SIGKILL
#: (docs/deploy.md).
GRACE = ["--mca", "odls_base_sigkill_timeout", "2"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class World:
    """One `mpirun … pagemill serve …`."""

    def __init__(self, binary, model, tp, pp, mpirun=(), host="127.0.0.1", prefix=(), extra=(), log=None):
        self.host, self.port, self.size = host, free_port(), tp * pp
        self.program = pathlib.Path(binary).name
        command = [*prefix, "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                   "--mca", "mpi_yield_when_idle", "1", "-np", str(self.size), *mpirun,
                   str(binary), "serve", str(model), "--tensor-parallel", str(tp), "--pipeline-parallel", str(pp),
                   "--host", host, "--port", str(self.port), "--threads", "1", *extra]
        self.log = open(log or os.devnull, "w")
        self.started = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)

    @property
    def base(self):
        return f"http://{self.host}:{self.port}"

    def wait_ready(self, seconds=120):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                reason = [line for line in self.lines() if line.startswith("pagemill: ")]
                raise SystemExit(f"the server ended with {self.process.returncode} before it was ready: {reason}")
            if self.health() == 200:
                return time.monotonic() - self.started
            time.sleep(0.1)
        raise RuntimeError(f"not ready after {seconds} s")

    def lines(self):
        """What it has printed."""
        path = pathlib.Path(self.log.name)
        return path.read_text().splitlines() if path.is_file() else []

    def health(self):
        try:
            return urllib.request.urlopen(self.base + "/health", timeout=2).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def ranks(self):
        """Process ids by rank: this world's pagemill processes, told apart by their own environment."""
        found = {}
        for folder in pathlib.Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                environment = dict(pair.split(b"=", 1) for pair in (folder / "environ").read_bytes().split(b"\0")
                                   if b"=" in pair)
            except OSError:
                continue
            if str(self.port).encode() in words and b"serve" in words and not words[0].endswith(b"mpirun"):
                rank = environment.get(b"OMPI_COMM_WORLD_RANK")
                if rank is not None and pathlib.Path(words[0].decode()).name == self.program:
                    found[int(rank)] = int(folder.name)
        return found

    def stop(self, seconds=30):
        """SIGTERM to rank 0, which drains and ends the others; the exit code of mpirun."""
        rank_0 = self.ranks().get(0)
        if rank_0:
            os.kill(rank_0, signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def destroy(self):
        """Ends whatever is left: this world's own ranks and its mpirun, by their ids."""
        for pid in [*self.ranks().values(), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        self.process.wait(10)
        self.log.close()


def complete(base, prompt, max_tokens, timeout=120):
    """One greedy completion: the text."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(base + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)["choices"][0]["text"]
