"""A TCP relay that behaves like a worse network: delay, a limited rate, a cable that is pulled out.

    python tests/relay.py --to 127.0.0.1:7001 --delay-ms 2 --mbit 100

Prints the port to connect to instead, and passes bytes on until it is ended. In a program:

    with Relay("127.0.0.1", 7001, delay_ms=2, mbit=100) as relay:
        node.connect("127.0.0.1", relay.port)
        relay.stall("to_target")  # a cable cut one way: nothing arrives, nobody is told
        relay.resume()            # what was sent in between arrives late
        relay.cut()               # every connection ends, and both sides are told; new ones are passed on again
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import threading
import time

WAYS = ("to_target", "to_client")
CHUNK_BYTES = 1 << 16
WAITING_CHUNKS = 1024  # then the sender is held up, as by a full socket
READ_AHEAD_S = 0.02  # how far the reader may run ahead of a limited rate


class Relay:
    """Listens on `port` of 127.0.0.1 and connects each client to the target.

    delay_ms is added to each way (so a round trip takes twice that); mbit limits each way of each connection, in
    megabits per second. passed[way] counts the bytes that were delivered.
    """

    def __init__(self, host: str, port: int, delay_ms: float = 0.0, mbit: float | None = None, listen_port: int = 0):
        self.target = (host, port)
        self.delay_s = delay_ms / 1e3
        self.seconds_per_byte = 8e-6 / mbit if mbit else 0.0
        self.passed = dict.fromkeys(WAYS, 0)
        self._flowing = {way: threading.Event() for way in WAYS}
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", listen_port))
        self.port = self._server.getsockname()[1]
        self.resume()

    def start(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def stop(self) -> None:
        """Ends the relay and all its connections."""
        with contextlib.suppress(OSError):  # wakes accept() where close() alone does not
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def __enter__(self):
        return self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def stall(self, *ways: str) -> None:
        """Nothing is delivered any more (both ways unless named), on present connections and on new ones."""
        for way in ways or WAYS:
            self._flowing[way].clear()

    def resume(self) -> None:
        for flowing in self._flowing.values():
            flowing.set()

    def cut(self) -> None:
        """Ends all present connections; what was stalled is lost. Flows again for new ones."""
        sockets, self._sockets = self._sockets, []
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.resume()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:  # stopped
                return
            try:
                target = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            self._sockets += [client, target]
            for sock in (client, target):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, way in ((client, target, "to_target"), (target, client, "to_client")):
                chunks: queue.Queue = queue.Queue(WAITING_CHUNKS)
                threading.Thread(target=self._read, args=(source, chunks), daemon=True).start()
                threading.Thread(target=self._deliver, args=(source, sink, way, chunks), daemon=True).start()

    def _read(self, source: socket.socket, chunks: queue.Queue) -> None:
        """Puts (when it is due, bytes); empty bytes at the end."""
        line_free_at = 0.0
        while True:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            line_free_at = max(line_free_at, time.monotonic()) + len(data) * self.seconds_per_byte
            chunks.put((line_free_at + self.delay_s, data))
            if not data:
                return
            time.sleep(max(0.0, line_free_at - time.monotonic() - READ_AHEAD_S))

    def _deliver(self, source: socket.socket, sink: socket.socket, way: str, chunks: queue.Queue) -> None:
        while True:
            due, data = chunks.get()
            time.sleep(max(0.0, due - time.monotonic()))
            self._flowing[way].wait()
            try:
                sink.sendall(data)
            except OSError:
                data = b""
            if not data:
                break
            self.passed[way] += len(data)
        for sock in (source, sink):  # one side has ended: so does the other
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--listen", type=int, default=0, metavar="PORT", help="default: any free port")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="added to each way")
    parser.add_argument("--mbit", type=float, help="megabits per second of each way (default: no limit)")
    args = parser.parse_args()
    host, _, port = args.to.rpartition(":")
    relay = Relay(host, int(port), args.delay_ms, args.mbit, args.listen).start()
    print(f"relay on 127.0.0.1 port {relay.port} to {args.to}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
