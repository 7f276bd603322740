"""Real clusters for tests: coordinator.py and node.py as processes on free ports, and a small HTTP client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY_CHAT = ROOT / "tests" / "tiny-chat"
START_S = 120.0  # generous: importing torch takes long on a busy machine


class Program:
    """A process whose output is kept, line by line; `wait_for` waits for a line instead of sleeping."""

    def __init__(self, command: list[str], env: dict | None = None, cwd: Path | None = None, stdin=subprocess.DEVNULL):
        self.process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=cwd, text=True
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str, timeout: float = START_S, after: int = 0) -> re.Match:
        """The first match of `pattern` in a line from `after` on; AssertionError with the output when there is none."""
        expression, looked = re.compile(pattern), after
        found = None

        def search() -> bool:
            nonlocal looked, found
            while looked < len(self.lines) and found is None:
                found = expression.search(self.lines[looked])
                looked += 1
            return found is not None or self._ended

        with self._changed:
            self._changed.wait_for(search, timeout)
        assert found is not None, f"no line matches {pattern!r}:\n" + "\n".join(self.lines[-60:])
        return found

    def wait(self, timeout: float = 30.0) -> int:
        """The exit code, once the process has ended."""
        code = self.process.wait(timeout)
        with self._changed:
            self._changed.wait_for(lambda: self._ended, timeout)
        return code

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def environment(threads: int | None = 1, **changes: str) -> dict:
    """This process's environment, without what would change a cluster under test.

    One thread each by default: several threads that wait for one another cost more than the tiny model's arithmetic,
    above all when the machine is busy. None: as many as torch likes.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRUECLUSTER_")}
    env |= {"PYTHONUNBUFFERED": "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    return {**env, **changes}


class Cluster:
    """A coordinator and some nodes. `with Cluster(model, nodes=2, flags=[...]) as cluster: cluster.chat(...)`."""

    def __init__(
        self,
        model: Path | str = TINY_CHAT,
        nodes: int = 2,
        flags: tuple = (),
        node_flags: tuple = (),
        work_dir: Path | None = None,
        threads: int | None = 1,
    ):
        self.env = environment(threads)
        self.node_flags = list(node_flags)
        # of its own: nothing that another cluster left there is found, and nothing stays
        self._folder = None if work_dir else tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.work_dir = work_dir or Path(self._folder.name)
        command = [sys.executable, str(ROOT / "coordinator.py"), "--model", str(model)]
        command += ["--node-host", "127.0.0.1", "--api-host", "127.0.0.1", "--node-port", "0", "--api-port", "0"]
        if nodes:
            command += ["--max-nodes", str(nodes)]
        self.coordinator = Program(command + list(map(str, flags)), env=self.env)
        self.nodes: list[Program] = []
        self._count = nodes

    def __enter__(self):
        try:
            ports = self.coordinator.wait_for(r"HTTP API on .* port (\d+), node port (\d+)")
            self.api_port, self.node_port = int(ports[1]), int(ports[2])
            for _ in range(self._count):
                self.add_node()
            if self._count:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def add_node(self, *flags: str, port: int | None = None) -> Program:
        """Starts one more node."""
        command = [sys.executable, str(ROOT / "node.py"), "--host", "127.0.0.1", "--port", str(port or self.node_port)]
        command += ["--device", "cpu", *self.node_flags, *flags]
        command += ["--work-dir", str(self.work_dir)]
        node = Program(command, env=self.env)
        self.nodes.append(node)
        return node

    def wait_ready(self, after: int = 0) -> None:
        """Waits until the coordinator says that it is ready (in its output from line `after` on)."""
        self.coordinator.wait_for(r"^curl http", after=after)

    def close(self) -> None:
        for program in [self.coordinator, *self.nodes]:
            if program.process.poll() is None:
                program.signal(signal.SIGCONT)  # a stopped process cannot end
                program.signal(signal.SIGTERM)
        for program in [self.coordinator, *self.nodes]:
            try:
                program.wait(timeout=15)
            except subprocess.TimeoutExpired:
                program.kill()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    def request(self, path: str, body: dict | None = None, timeout: float = 120.0) -> tuple[int, dict]:
        """(status, JSON) of a GET, or of a POST when there is a body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def chat(self, *messages: dict | str, **fields) -> dict:
        """The answer's JSON to a chat; strings are user turns. Greedy unless told otherwise."""
        turns = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        body = {"messages": turns, "temperature": 0, "max_tokens": 64, **fields}
        status, answer = self.request("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def chat_text(self, *messages: dict | str, **fields) -> str:
        return self.chat(*messages, **fields)["choices"][0]["message"]["content"]

    def complete(self, prompt, **fields) -> dict:
        """The answer's JSON to a completion, greedy unless told otherwise."""
        status, answer = self.request(
            "/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
        )
        assert status == 200, answer
        return answer

    def status(self) -> dict:
        return self.request("/status")[1]
