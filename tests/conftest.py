"""Clusters that many tests share. They are started once, and only when a test asks for them."""

import logging
import os
import signal
from pathlib import Path

import pytest
from cluster import TINY_CHAT, WarmCluster

import coordinator

# A shell script that starts the tests with & has them, and all that they start, ignore Ctrl-C; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_handler_left_behind():
    """A test that runs a main() leaves a log handler on the output that pytest captured and then closes."""
    yield
    for log in (coordinator.log, logging.getLogger("node")):
        log.handlers.clear()


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of a real model, named by TRUECLUSTER_TEST_MODEL; without it the test is skipped."""
    folder = os.environ.get("TRUECLUSTER_TEST_MODEL")
    if not folder:
        pytest.skip("TRUECLUSTER_TEST_MODEL names no model folder")
    return Path(folder)


def _shared_cluster(quant: str, nodes: int, *flags: str):
    @pytest.fixture(scope="session", name=f"{quant}_cluster" if nodes == 2 else f"{quant}_cluster_of_{nodes}")
    def cluster():
        with WarmCluster(TINY_CHAT, nodes=nodes, flags=("--quant", quant, *flags)) as running:
            yield running

    return cluster


fp16_cluster = _shared_cluster("fp16", 2)
int8_cluster = _shared_cluster("int8", 2, "--slots", "8")
int4_cluster = _shared_cluster("int4", 2, "--slots", "8")
