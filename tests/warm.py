"""Starts coordinators and nodes in milliseconds: a process that has imported torch already, and forks.

tests/cluster.py runs this file with one end of a socket pair (Warm). A JSON object that comes with the descriptor that
the program shall write to starts one program; the answer is its pid. {"ended": pid} is answered with the exit code,
once the program has ended. All of them end when the socket does.

A program may be given faults: functions of this file, which change the forked child and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import coordinator
import node
import qwen

PROGRAMS = {"coordinator": coordinator, "node": node}
ERRORS = {
    "RuntimeError": RuntimeError("expected a tensor of another size"),
    "ValueError": ValueError("not what it was yesterday"),
    "out of memory": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 12 GiB"),
}


# ----------------------------------------------------------------------------
# Faults
# ----------------------------------------------------------------------------


def setting(name: str, value: float) -> None:
    """A constant like coordinator.OUTAGE_LIMIT_S with another value."""
    module, constant = name.split(".")
    assert hasattr(PROGRAMS[module], constant), name
    setattr(PROGRAMS[module], constant, value)


def variable(name: str, value: str) -> None:
    """An environment variable."""
    os.environ[name] = value


def slow_layers(seconds: float) -> None:
    """Every layer takes that much longer, as on a slower machine."""
    forward = qwen.DecoderLayer.forward

    def slow_forward(layer, *args):
        time.sleep(seconds)
        return forward(layer, *args)

    qwen.DecoderLayer.forward = slow_forward


def before_passes(action, rows: int) -> None:
    """Runs an action before every pass of exactly so many rows."""
    run = qwen.Stage.run

    def run_after_action(stage, hidden_states, *args):
        if hidden_states.shape[0] == rows:
            action()
        return run(stage, hidden_states, *args)

    qwen.Stage.run = run_after_action


def slow_pass(rows: int, seconds: float) -> None:
    """Passes of so many rows take that much longer."""
    before_passes(lambda: time.sleep(seconds), rows)


def failing_pass(rows: int, error: str) -> None:
    """Passes of so many rows raise one of ERRORS."""

    def fail():
        raise ERRORS[error]

    before_passes(fail, rows)


def deadly_pass(rows: int) -> None:
    """Passes of so many rows end the process, as the kernel does when memory runs out."""
    before_passes(lambda: os.kill(os.getpid(), signal.SIGKILL), rows)


def slow_checkpoint(seconds: float) -> None:
    """Every tensor takes that long to be hashed, as in a large model."""
    digest = coordinator.Checkpoint._digest

    def slow_digest(checkpoint, name):
        time.sleep(seconds)
        return digest(checkpoint, name)

    coordinator.Checkpoint._digest = slow_digest


def full_disk(nbytes: int) -> None:
    """No file can become larger than that: writing fails in the middle, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))


def room_for_layers(most: int) -> None:
    """Memory for larger stages is promised, but not there."""
    make = qwen.Stage.__init__

    def make_small(stage, config, start, end, *args):
        if end - start > most:
            raise ERRORS["out of memory"]
        make(stage, config, start, end, *args)

    qwen.Stage.__init__ = make_small


FAULTS = {
    function.__name__: function
    for function in (
        setting,
        variable,
        slow_layers,
        slow_pass,
        failing_pass,
        deadly_pass,
        slow_checkpoint,
        full_disk,
        room_for_layers,
    )
}


# ----------------------------------------------------------------------------
# Forking
# ----------------------------------------------------------------------------


def become(program: str, arguments: list[str], faults: list[list], output: int) -> None:
    """Runs a program in this forked child and ends it; an exception ends it too, with its traceback in the output."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for name, *values in faults:
        FAULTS[name](*values)
    code = PROGRAMS[program].main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(channel: socket.socket) -> None:
    torch.set_num_threads(1)  # no threads of OpenMP, which a fork would not take along
    children = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not message:
            break
        request = json.loads(message)
        if "ended" in request:
            children.remove(request["ended"])
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                become(**request, output=descriptors[0])
            os.close(descriptors[0])
            children.add(answer)
        channel.sendall(f"{answer}\n".encode())
    for pid in children:  # none of these numbers can belong to another process: they have not been waited for
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
