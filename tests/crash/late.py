"""A service that handles requests late, and tools that use it.

A request waits in the queue of the service even if the process that sent it dies.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from perdure import Call, Outcome, Run, agent, tool

TIMEOUT_S = 8.0
# How long a request waits in the queue: far below the time-out, so that a busy machine makes no difference.
IN_QUEUE_S = 2.0


class LateService:
    """Keeps requests in a queue before it executes them, and answers truthfully what it has done.

    It has its own ledger.
    """

    def __init__(self, in_queue_s: float = IN_QUEUE_S) -> None:
        self._in_queue_s = in_queue_s
        self._orders, self._questions = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
        self.orders_port, self.questions_port = self._orders.getsockname()[1], self._questions.getsockname()[1]
        self._stopped = threading.Event()
        self.done: list[str] = []  # keys, once for each effect
        self.queued = threading.Event()  # a request is in the queue
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._take_orders, self._answer_questions)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._orders.close()
        self._questions.close()

    def _take_orders(self) -> None:
        while not self._stopped.is_set():
            if select.select([self._orders], [], [], 0.05)[0]:
                with self._orders.accept()[0] as line:
                    line.settimeout(5)
                    key = _read_line(line)
                self.queued.set()
                self._stopped.wait(self._in_queue_s)
                self.done.append(key)

    def _answer_questions(self) -> None:
        while not self._stopped.is_set():
            if select.select([self._questions], [], [], 0.05)[0]:
                with self._questions.accept()[0] as line:
                    line.settimeout(5)
                    line.sendall(b"yes\n" if _read_line(line) in self.done else b"no\n")


def _read_line(line: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and (more := line.recv(1024)):
        data += more
    return data.decode().strip()


def _send(port: int, key: str) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", port))
    line.sendall(f"{key}\n".encode())
    return line


def order(port: int, call: Call) -> str:
    """Send the request and wait for an answer, which never comes in time."""
    with _send(port, call.key):
        time.sleep(60)
    return "unreachable"


async def find(questions: int, call: Call) -> Outcome:
    with _send(questions, call.key) as line:
        return Outcome.happened("done") if _read_line(line) == "yes" else Outcome.not_happened()


@tool(effect="once", isolate=True, timeout=TIMEOUT_S)
def order_isolated(port: int, questions: int, call: Call) -> str:
    return order(port, call)


@tool(effect="once")
def order_without_timeout(port: int, questions: int, call: Call) -> str:
    return order(port, call)


@tool(effect="once", timeout=TIMEOUT_S)
def order_over_a_line_that_breaks(port: int, questions: int, call: Call) -> str:
    _send(port, call.key).close()
    raise ConnectionResetError("the line broke after the request was sent")


@tool(effect="once", timeout=1.0)
def order_in_turn(port: int, questions: int, call: Call) -> str:
    _send(port, call.key).close()
    return "done"


@order_in_turn.reconcile
async def find_in_turn(port: int, questions: int, call: Call) -> Outcome:
    return await find(questions, call)


@tool(effect="read")
def hold_the_thread(until: str) -> str:
    while not os.path.exists(until):
        time.sleep(0.01)
    return "free"


@agent(version="1")
async def holder(run: Run, until: str) -> str:
    return str(await hold_the_thread(until))


TOOLS = {one.name: one for one in (order_isolated, order_without_timeout, order_over_a_line_that_breaks, order_in_turn)}


@order_isolated.reconcile
async def find_isolated(port: int, questions: int, call: Call) -> Outcome:
    return await find(questions, call)


@order_without_timeout.reconcile
async def find_without_timeout(port: int, questions: int, call: Call) -> Outcome:
    return await find(questions, call)


@order_over_a_line_that_breaks.reconcile
async def find_after_a_break(port: int, questions: int, call: Call) -> Outcome:
    return await find(questions, call)


@agent(version="1")
async def orderer(run: Run, tool_name: str, port: int, questions: int) -> str:
    return str(await TOOLS[tool_name](port, questions))
