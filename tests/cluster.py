"""Real clusters for tests: coordinator.py and node.py as processes on free ports, and a small HTTP client."""

from __future__ import annotations

import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY_CHAT = ROOT / "tests" / "tiny-chat"
START_S = 120.0  # generous: importing torch takes long on a busy machine


class Program:
    """A process whose output is kept, line by line; `wait_for` waits for a line instead of sleeping."""

    def __init__(self, command: list[str], env: dict | None = None, cwd: Path | None = None, stdin=subprocess.DEVNULL):
        self._follow(
            subprocess.Popen(
                command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, cwd=cwd, text=True
            )
        )

    def _follow(self, process) -> None:
        self.process = process
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


def wait_until(holds: Callable[[], bool], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def environment(threads: int | None = 1, **changes: str) -> dict:
    """This process's environment, without what would change a cluster under test.

    One thread each by default: several threads that wait for one another cost more than the tiny model's arithmetic,
    above all when the machine is busy. None: as many as torch likes.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRUECLUSTER_")}
    env |= {"PYTHONUNBUFFERED": "1"} | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    return {**env, **changes}


class ForkedProcess:
    """A child of tests/warm.py, with what Program uses of Popen. It has ended when its output has."""

    def __init__(self, warm: Warm, pid: int, output: int):
        self.pid = pid
        self.stdout = self._lines(os.fdopen(output, encoding="utf-8", errors="replace"))
        self._warm = warm
        self._code: int | None = None
        self._ended = threading.Event()

    def _lines(self, output) -> Iterator[str]:
        with output:
            yield from output
        self._code = self._warm.ask({"ended": self.pid})
        self._ended.set()

    def poll(self) -> int | None:
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Warm:
    """The process of tests/warm.py, which forks the programs that are asked for."""

    def __init__(self):
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair()
        command = [sys.executable, str(ROOT / "tests" / "warm.py"), str(theirs.fileno())]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment(), pass_fds=[theirs.fileno()])
        theirs.close()

    def ask(self, request: dict, *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], descriptors)
            return int(self._channel.recv(64))

    def fork(self, program: str, arguments: list[str], faults: tuple = ()) -> ForkedProcess:
        """program: coordinator or node; faults: (name of a function of warm.py, *its arguments) each."""
        output, theirs = os.pipe()
        request = {"program": program, "arguments": arguments, "faults": [list(fault) for fault in faults]}
        pid = self.ask(request, theirs)
        os.close(theirs)
        return ForkedProcess(self, pid, output)


@functools.cache
def warm() -> Warm:
    """The one Warm of this test run; it ends with it."""
    return Warm()


class WarmProgram(Program):
    """A Program that starts without importing anything, and possibly with faults."""

    def __init__(self, program: str, arguments: list[str], faults: tuple = ()):
        self._follow(warm().fork(program, arguments, faults))


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
        arguments = ["--model", str(model), "--node-host", "127.0.0.1", "--api-host", "127.0.0.1"]
        arguments += ["--node-port", "0", "--api-port", "0"]
        if nodes:
            arguments += ["--max-nodes", str(nodes)]
        self._arguments = arguments + list(map(str, flags))
        self.coordinator = self._launch("coordinator", self._arguments)
        self.nodes: list[Program] = []
        self._count = nodes

    def _launch(self, program: str, arguments: list[str]) -> Program:
        return Program([sys.executable, str(ROOT / f"{program}.py"), *arguments], env=self.env)

    def __enter__(self):
        try:
            self._wait_for_ports()
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

    def _wait_for_ports(self) -> None:
        ports = self.coordinator.wait_for(r"HTTP API on .* port (\d+), node port (\d+)")
        self.api_port, self.node_port = int(ports[1]), int(ports[2])

    def restart_coordinator(self) -> None:
        """Kills the coordinator and starts another on the same node port."""
        self.coordinator.kill()
        self.coordinator = self._launch("coordinator", [*self._arguments, "--node-port", str(self.node_port)])
        self._wait_for_ports()

    def add_node(self, *flags: str, port: int | None = None) -> Program:
        """Starts one more node."""
        arguments = ["--host", "127.0.0.1", "--port", str(port or self.node_port), "--device", "cpu"]
        arguments += [*self.node_flags, *flags, "--work-dir", str(self.work_dir)]
        node = self._launch("node", arguments)
        self.nodes.append(node)
        return node

    def wait_ready(self, after: int = 0) -> None:
        """Waits until the coordinator says that it is ready (in its output from line `after` on)."""
        self.coordinator.wait_for("ready to generate over", after=after)

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

    def stream(self, prompt, timeout: float = 120.0, **fields) -> Iterator[dict]:
        """The chunks of a streamed completion, greedy, of full length; an error before the first byte is a chunk too.

        Closing the generator closes the connection.
        """
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
        connection = http.client.HTTPConnection("127.0.0.1", self.api_port, timeout=timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                yield json.load(response)
                return
            for line in response:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])
            assert line.strip() == b"" and response.read() == b""
        finally:
            connection.close()

    def status(self) -> dict:
        return self.request("/status")[1]


class WarmCluster(Cluster):
    """A Cluster of forked programs: it is there at once, its nodes measure briefly, and they can be given faults."""

    def __init__(self, *args, faults: tuple = (), **kwargs):
        self._faults = {"coordinator": faults, "node": ()}
        super().__init__(*args, **kwargs)

    def _launch(self, program: str, arguments: list[str]) -> Program:
        quick = (("setting", "node.MEASURE_SECONDS", 0.01),)
        return WarmProgram(program, arguments, quick + self._faults[program])

    def add_node(self, *flags: str, port: int | None = None, faults: tuple = ()) -> Program:
        """Starts one more node, which has these faults."""
        self._faults["node"] = faults
        return super().add_node(*flags, port=port)
