"""Work without anybody who asks: a program that makes renditions in a loop, for as long as it is told.

It listens at a port of its own. An order is a line of JSON on a new connection: first what to make, later for how
long; the answer is a line too. So it is a process like any other server, idle while others have their
turn, and the kernel's account of it is taken in the same way.
"""

import base64
import itertools
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.work import Task

Job = Callable[[], bytes]


class Order(msgspec.Struct, omit_defaults=True):
    """With `tasks`: get ready for them. With `seconds`: work, from the task of this number on, round and round."""

    tasks: tuple[Task, ...] = ()
    first: int = 0
    seconds: float = 0.0


class Done(msgspec.Struct):
    """How many renditions were made in how long. `sample` is the very first of all tasks, as base64."""

    jobs: int
    seconds: float
    sample: str


def serve(port: int, folder: Path, prepare: Callable[[bytes, Sequence[Task]], Sequence[Job]]) -> None:
    """Answer orders for ever. The pictures are in this folder; what `prepare` does with one is not counted."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        jobs: Sequence[Job] = ()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                line = lines.readline()
                if not line:
                    # Somebody looked whether we listen.
                    continue
                order = msgspec.json.decode(line, type=Order)
                if order.tasks:
                    jobs = prepare((folder / order.tasks[0].picture).read_bytes(), order.tasks)
                connection.sendall(msgspec.json.encode(_work(jobs, order)) + b"\n")


def _work(jobs: Sequence[Job], order: Order) -> Done:
    if not order.seconds:
        return Done(0, 0.0, base64.b64encode(jobs[0]()).decode())
    count, began = 0, time.monotonic()
    now = began
    for job in itertools.islice(itertools.cycle(jobs), order.first % len(jobs), None):
        job()
        count += 1
        now = time.monotonic()
        if now >= began + order.seconds:
            break
    return Done(count, now - began, "")
