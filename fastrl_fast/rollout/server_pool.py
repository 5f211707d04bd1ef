"""HTTP servers that share one load: each request is answered once, whichever of them fail meanwhile."""

import asyncio
import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import anyio
import httpx2

from .request import EngineLost

log = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

FIRST_REST, LONGEST_REST = 0.25, 4.0
"""Seconds that a server is left alone after a failure, doubling. vLLM takes longer to start than the longest: one that
was restarted meanwhile is always found refusing connections, and so found to be without the policy's weights."""
HEALTH_TIMEOUT = 10.0


class BadAnswer(Exception):
    """A server's answer that cannot be what was asked for; another server may do better."""


FAILURES = (BadAnswer, OSError, httpx2.HTTPError)  # a TimeoutError is an OSError
"""What makes another server worth a try."""


@dataclass(slots=True, frozen=True)
class Job(Generic[T, A]):
    """One POST to any server, `completions` of at most `tokens` tokens in all; `read` makes the answer of its JSON, or
    raises BadAnswer."""

    item: T
    path: str
    body: dict[str, Any]
    completions: int
    tokens: int
    read: Callable[[dict[str, Any]], A]


@dataclass(slots=True)
class Server:
    """A server, what it was asked and has not answered, and whether it may be asked more."""

    url: str
    completions: int = 0
    tokens: int = 0
    well: bool = True
    current: bool = True
    """Whether its weights are the policy's: not after it was found gone, as one that comes back has those of its
    start."""
    failures: int = 0

    @property
    def serving(self) -> bool:
        return self.well and self.current


class ServerPool:
    """Spreads jobs over servers by outstanding tokens, from a thread of its own in which nothing else runs.

    A server that fails (refuses, breaks off, answers 5xx or nonsense, takes longer than `timeout` seconds) is left
    alone for a while, and what it was asked is asked of another. Where none serves for `patience` seconds the calls
    raise EngineLost.
    """

    def __init__(self, urls: list[str], *, room: int, timeout: float, patience: float) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self._room, self._timeout, self._patience = room, timeout, patience
        self._nurses: dict[str, asyncio.Task[None]] = {}
        self._answered_at = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-servers", daemon=True)
        self._thread.start()
        self._client, self._changed = self._do(self._begin())
        atexit.register(self.close)

    def answers(self, jobs: list[Job[T, A]]) -> Iterator[tuple[T, A]]:
        """The items with their answers, each once, as they come. Raises EngineLost, or ValueError where servers call a
        request itself wrong (4xx); whatever is outstanding when the caller leaves is called off."""
        if not jobs:
            return
        answered: queue.SimpleQueue[tuple[T, A] | BaseException] = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._answer_all(jobs, answered), self._loop)
        try:
            for _ in jobs:
                found = answered.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            work.cancel()

    def get(self, server: Server, path: str, **options: Any) -> Any:
        """The JSON of one server, or None where it fails."""
        return self._do(self._try("GET", server, path, **options))

    def post(self, server: Server, path: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """The same, of a POST."""
        return self._do(self._try("POST", server, path, json=body or {}, **options))

    def post_to_all(self, servers: list[Server], path: str, bodies: list[dict[str, Any]], **options: Any) -> None:
        """One POST to each server at once. Raises EngineLost as soon as one fails; the others are called off then."""

        async def post(server: Server, body: dict[str, Any]) -> None:
            if await self._try("POST", server, path, json=body, **options) is None:
                raise EngineLost(f"{server.url}{path} failed")

        self._do(_all([post(server, body) for server, body in zip(servers, bodies, strict=True)]))

    def well(self, *, wait_for_all: bool = False) -> list[Server]:
        """The servers that are there now; waits, `patience` seconds at most, for the first, or for all.

        Raises EngineLost where none is.
        """
        return self._do(self._well(wait_for_all))

    def mark_current(self, urls: list[str]) -> None:
        """Only the servers with these URLs have the policy's weights."""
        self._do(self._mark_current(urls))

    def close(self) -> None:
        """Call off whatever goes on, and end the thread."""
        atexit.unregister(self.close)
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begin(self) -> tuple[httpx2.AsyncClient, asyncio.Condition]:
        # vLLM's servers close what was idle for 5 s: a request on its way meanwhile would look like a failure.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        # A proxy of the environment is for the world outside.
        return httpx2.AsyncClient(limits=limits, trust_env=False), asyncio.Condition()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _answer_all(self, jobs: list[Job[T, A]], answered: "queue.SimpleQueue[Any]") -> None:
        async def answer(job: Job[T, A]) -> None:
            answered.put((job.item, await self._answer(job)))

        try:
            await _all([answer(job) for job in jobs])
        except Exception as error:
            answered.put(error)

    async def _answer(self, job: Job[T, A]) -> A:
        failing_since = 0.0
        while True:
            server = await self._choose(job.completions)
            server.completions += job.completions
            server.tokens += job.tokens
            try:
                answer = job.read(await self._send("POST", server, job.path, self._timeout, json=job.body))
                server.failures, self._answered_at = 0, time.monotonic()
                return answer
            except FAILURES as error:
                self._failed(server, error)
                failing_since = failing_since or time.monotonic()
                # Servers that are well by their own account and fail whatever they are asked are no servers either.
                if time.monotonic() - max(failing_since, self._answered_at) > self._patience:
                    raise self._lost() from error
            finally:
                server.completions -= job.completions
                server.tokens -= job.tokens
                async with self._changed:
                    self._changed.notify_all()

    async def _choose(self, completions: int) -> Server:
        """The serving one with the fewest outstanding tokens, once one has room."""
        since = time.monotonic()
        async with self._changed:
            while True:
                serving = [server for server in self.servers if server.serving]
                room = [s for s in serving if s.completions == 0 or s.completions + completions <= self._room]
                if room:
                    return min(room, key=lambda server: server.tokens)
                since = time.monotonic() if serving else since
                left = since + self._patience - time.monotonic()
                if left <= 0:
                    raise self._lost()
                await self._change(left)

    async def _send(self, method: str, server: Server, path: str, timeout: float, **content: Any) -> Any:
        """The JSON of an answer that is complete; within `timeout` seconds, also from a server that trickles."""
        # Not asyncio.wait_for, which before Python 3.12 loses a cancellation that comes with the answer.
        with anyio.fail_after(timeout):
            response = await self._client.request(method, server.url + path, timeout=None, **content)
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):
            text = " ".join(response.text.split())
            raise ValueError(f"rollout.vllm.servers: {server.url}{path} answered {response.status_code}: {text:.300}")
        if response.status_code >= 400:
            raise BadAnswer(f"answered {response.status_code}")
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise BadAnswer(f"answered with {len(response.content)} bytes that are no JSON") from error

    async def _try(self, method: str, server: Server, path: str, *, timeout: float = 60.0, **content: Any) -> Any:
        try:
            return await self._send(method, server, path, timeout, **content)
        except FAILURES as error:
            self._failed(server, error)
            return None

    def _failed(self, server: Server, error: Exception) -> None:
        """Take a server out, say so, and have it looked after; failures of what else it was asked count as one."""
        if server.url not in self._nurses:
            log.warning("vLLM server %s: %s; what it was asked goes to the others", server.url, _reason(error))
            server.well = False
            server.current = server.current and not isinstance(error, httpx2.ConnectError)
            self._nurses[server.url] = asyncio.get_running_loop().create_task(self._nurse(server))

    async def _nurse(self, server: Server) -> None:
        """Look at a failed server until it is well."""
        while True:
            await asyncio.sleep(min(LONGEST_REST, FIRST_REST * 2**server.failures))
            server.failures = min(server.failures + 1, 16)
            if await self._healthy(server):
                break
        del self._nurses[server.url]
        left_out = "" if server.current else ", without the policy's weights until the next hand-over"
        log.warning("vLLM server %s: is back%s", server.url, left_out)
        async with self._changed:
            server.well = True
            self._changed.notify_all()

    async def _healthy(self, server: Server) -> bool:
        try:
            await self._send("GET", server, "/health", HEALTH_TIMEOUT)
            return True
        except httpx2.ConnectError:
            server.current = False
        except (ValueError, *FAILURES):
            pass
        return False

    async def _well(self, wait_for_all: bool) -> list[Server]:
        limit = time.monotonic() + self._patience
        for server in self.servers:
            if server.url not in self._nurses and not await self._healthy(server):
                self._failed(server, BadAnswer("is not there"))
        enough = all if wait_for_all else any
        async with self._changed:
            while not enough(server.well for server in self.servers) and (left := limit - time.monotonic()) > 0:
                await self._change(left)
        if well := [server for server in self.servers if server.well]:
            return well
        raise self._lost()

    async def _change(self, seconds: float) -> None:
        """Wait for a change, `seconds` at most; the lock is held."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()

    def _lost(self) -> EngineLost:
        return EngineLost(f"none of {len(self.servers)} vLLM servers answered for {self._patience:g} s")

    async def _mark_current(self, urls: list[str]) -> None:
        async with self._changed:
            for server in self.servers:
                server.current = server.url in urls
            self._changed.notify_all()


async def _all(works: list[Coroutine[Any, Any, None]]) -> None:
    """Do these at once; the first that fails ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _reason(error: Exception) -> str:
    """What happened, in a few words; timeouts say nothing of themselves."""
    if isinstance(error, TimeoutError):
        return "took too long"
    if isinstance(error, httpx2.ConnectError):
        return "refused the connection"
    return " ".join(str(error).split()) or type(error).__name__
