"""An HTTP server that speaks as much of vLLM's interface as we use, makes tokens up, and fails as it is told."""

import contextlib
import json
import random
import socket
import threading
import time
import zlib
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STOP, VOCABULARY = 3, 40


def made_up(prompt: list[int], seed: int, most: int) -> list[int]:
    """The completion of a prompt by its seed, the same from every server."""
    lot = random.Random(f"{prompt} {seed}")
    ids = [lot.randrange(4, VOCABULARY) for _ in range(lot.randrange(1, most + 1))]
    return ids if len(ids) == most else [*ids[:-1], STOP]


class FakeServer:
    """Answers completions on a port of loopback until it is told to `die`.

    `faults` are met by its first completions, one each: 500, half (of an answer), cut (off before one), nonsense, fewer
    (choices than asked for), null (for a logprob), hang, trickle, none; later ones meet `always`. It dies of its own at
    request `dies_at`. The prompt that it `refuses` is answered with 400; `busy` times it does not empty its cache.
    `delay` is seconds per completion. With `follows` what it makes up depends on the weights in the folder that it was
    told of last. Requests for several completions wait while `gate` is not set. All tokens have one `logprob`.
    """

    def __init__(
        self,
        *,
        faults: Iterable[str] = (),
        always: str = "none",
        delay: float = 0.0,
        dies_at: int = 0,
        port: int = 0,
        follows: bool = False,
    ) -> None:
        self.faults, self.always, self.delay, self.dies_at = iter(faults), always, delay, dies_at
        self.posts: list[tuple[str, Any]] = []
        self.answered: list[Any] = []
        self.refuses: list[int] = []
        self.logprob = -0.5
        self.busy = 0
        self.end = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.follows, self.weights = follows, 0
        self.at_gate: set[int] = set()
        self.at_gate_when_handed: list[int] = []
        """How many requests waited whenever weights came."""
        self._connections: set[socket.socket] = set()
        self._http = _QuietServer(("127.0.0.1", port), type("Handler", (_Handler,), {"fake": self}))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def asked(self, path: str = "/v1/completions") -> list[Any]:
        return [body for at, body in self.posts if at == path]

    def take_weights(self, folder: str) -> None:
        self.at_gate_when_handed.append(len(self.at_gate))
        if self.follows:
            files = sorted(Path(folder).glob("*.safetensors"))
            self.weights = zlib.crc32(b"".join(file.read_bytes() for file in files))

    def die(self) -> None:
        """Break off every connection and take no more."""
        self.end.set()
        self._http.socket.close()
        for connection in list(self._connections):
            _break_off(connection)
        threading.Thread(target=self._http.shutdown, daemon=True).start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.die()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *unused: object) -> None:
        """A client that left is no news."""


def _break_off(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def setup(self) -> None:
        super().setup()
        self.fake._connections.add(self.connection)
        if self.fake.end.is_set():  # it was accepted while the others were broken off
            _break_off(self.connection)

    def log_message(self, *unused: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": "tiny", "max_model_len": 128}]}
        self._send({"/v1/models": models, "/get_world_size": {"world_size": 1}}.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.fake.posts.append((self.path, body))
        if self.path == "/collective_rpc":
            self.fake.take_weights(body["args"][0])
        if self.path == "/reset_prefix_cache":
            self.fake.busy -= 1
            return self._send({"success": self.fake.busy < 0})
        if self.path != "/v1/completions":
            return self._send({})
        self.fake.at_gate.add(id(body))
        while body["n"] > 1 and not self.fake.gate.wait(0.02) and not self.fake.end.is_set():
            pass
        self.fake.at_gate.discard(id(body))
        number = len(self.fake.asked())
        if number == self.fake.dies_at:
            return self.fake.die()
        self.fake.end.wait(self.fake.delay * body["n"])
        fault = "400" if body["prompt"] == self.fake.refuses else next(self.fake.faults, self.fake.always)
        getattr(self, f"_{fault}", self._none)(self._answer(body))
        if fault == "none":
            self.fake.answered.append(body)

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for i in range(body["n"]):
            ids = made_up(body["prompt"], body["seed"] + i + self.fake.weights, body["max_tokens"])
            logprobs = [0.0 if body["top_k"] == 1 else self.fake.logprob] * len(ids)
            choices.append({"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}})
        return {"choices": choices[::-1]}

    def _send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _none(self, answer: Any) -> None:
        self._send(answer)

    def _500(self, answer: Any) -> None:
        self._send({"error": "no"}, 500)

    def _400(self, answer: Any) -> None:
        self._send({"error": "prompt is too long"}, 400)

    def _half(self, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True

    def _cut(self, answer: Any) -> None:
        self.close_connection = True
        _break_off(self.connection)

    def _nonsense(self, answer: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    def _fewer(self, answer: Any) -> None:
        self._send({"choices": answer["choices"][1:]})

    def _null(self, answer: Any) -> None:
        answer["choices"][0]["logprobs"]["token_logprobs"][-1] = None
        self._send(answer)

    def _hang(self, answer: Any) -> None:
        self.fake.end.wait(60)
        self.close_connection = True

    def _trickle(self, answer: Any) -> None:
        """Bytes that never stop coming: no gap is long enough for a timeout of reading."""
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not self.fake.end.is_set():
            try:
                self.wfile.write(b" ")
                time.sleep(0.05)
            except OSError:
                return
