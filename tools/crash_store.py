"""A store for tools/crash_campaign.py: moto's S3 server, behind proxies that disturb requests.

Each try has its own proxy, which relays bytes. A request begins with the first bytes from the
client after some from the server.
"""

import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

CONTINUE = b"HTTP/1.1 100"  # the server asks for the body of a request
REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def environment(port: int) -> dict[str, str]:
    """The variables that make s3fs use a server on this machine, and give up soon."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_RETRY_MODE": "standard",
        "AWS_MAX_ATTEMPTS": "2",
    }


def connect(port: int) -> socket.socket:
    """A connection to a server on this machine."""
    return socket.create_connection(("127.0.0.1", port))


@contextmanager
def s3_server() -> Iterator[int]:
    """Start the server, and yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    try:
        while process.poll() is None:
            with suppress(ConnectionRefusedError), connect(port):
                break
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def is_complete(answer: bytes) -> bool:
    """Whether these bytes are a complete answer, judged by its Content-Length."""
    head, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    return bool(separator) and length is not None and len(body) >= int(length[1])


class Proxy:
    """Stands between the runs of a try and the server.

    Args:
        port: the server's port.
        kill: a function that ends the run with the given first process.

    Attributes:
        port: the proxy's port, for the runs.
        process: the first process of the run.
        seconds: how long each request is delayed.
        struck: the number of disturbed requests.
    """

    def __init__(self, port: int, kill: Callable[[int], object]) -> None:
        relay = self._relay

        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                relay(self.request)

        self._listener = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self._server, self._kill = port, kill
        self._lock = threading.Lock()
        self.port: int = self._listener.server_address[1]
        self.process = 0
        self._list = b""  # the answer to the last listing request
        self.plan("", 0)
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def plan(self, how: str, number: int, count: int = 1, seconds: float = 0.0) -> None:
        """Choose which of the next requests to disturb, and how.

        Args:
            how: "kill" or "refuse" at a request; "kill at the answer"; "cut" or "cut the answer";
                "repeat" sends a request to the server twice; "late" answers each listing request
                with the previous listing.
            number: the number of requests to let through first.
            count: the number of requests to disturb.
            seconds: how long each request is delayed.
        """
        self._how, self._first, self._count = how, number, count
        self.seconds = seconds
        self.struck = 0

    def close(self) -> None:
        """Stop listening."""
        self._listener.shutdown()
        self._listener.server_close()

    def _next(self) -> str:
        """How to disturb the next request; "" if not at all."""
        time.sleep(self.seconds)
        with self._lock:
            self._first -= 1
            if not -self._count <= self._first < 0 or not self._how:
                return ""
            self.struck += 1
            return self._how

    def _relay(self, client: socket.socket) -> None:
        with connect(self._server) as server, suppress(ConnectionError):
            how, answered, request = "", True, b""
            while True:
                ready, _, _ = select.select([client, server], [], [])
                for source in ready:
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is server and data.startswith(CONTINUE):
                        client.sendall(data)
                        continue
                    if source is client and answered:
                        request, how = b"", self._next()
                        late = self._late_list(data)
                        if how == "late" and late:
                            client.sendall(late)
                            continue
                    answered = source is server
                    if answered and how == "repeat":
                        self._answer(request)
                        how = ""
                    request += data
                    if self._disturb(how, answered, data, client, server):
                        return
                    (client if answered else server).sendall(data)

    def _late_list(self, request: bytes) -> bytes:
        """The answer to the previous listing request; nothing if this is not a listing request."""
        if b"list-type=2" not in request.partition(b"\r\n")[0]:
            return b""
        answer = self._answer(request)
        with self._lock:
            late, self._list = self._list or answer, answer
        return late

    def _answer(self, request: bytes) -> bytes:
        """Send a request to the server over a new connection, and return the complete answer."""
        head, _, body = request.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Expect")]
        answer = b""
        with connect(self._server) as server, suppress(TimeoutError):
            server.settimeout(0.5)
            server.sendall(b"\r\n".join([*lines, b"", body]))
            while not is_complete(answer) and (data := server.recv(1 << 16)):
                answer += data
        return answer

    def _disturb(
        self,
        how: str,
        answered: bool,
        data: bytes,
        client: socket.socket,
        server: socket.socket,
    ) -> bool:
        """Disturb a request; return whether its connection ends here."""
        if how in ("", "late", "repeat") or how.endswith("answer") != answered:
            return False
        if how.startswith("kill"):
            self._kill(self.process)
        elif how.startswith("cut"):
            (client if answered else server).sendall(data[: len(data) // 2])
        else:
            client.sendall(REFUSED)
            client.settimeout(1)
            with suppress(TimeoutError):  # else it would not read the answer
                while client.recv(1 << 16):
                    pass
        return True
