"""A node that takes longer for every layer it computes, as a slower machine would: node.py with a sleep in each.

python tests/slow_node.py --host HOST --port PORT
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import node

SLOW_MS = 5.0  # a layer of the bundled model takes a few tenths of a millisecond
forward = node.qwen.DecoderLayer.forward


def slow_forward(layer, *args):
    time.sleep(SLOW_MS / 1e3)
    return forward(layer, *args)


if __name__ == "__main__":
    node.qwen.DecoderLayer.forward = slow_forward
    sys.exit(node.main())
