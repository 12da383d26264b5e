"""A client that asks at fixed times, whatever becomes of the answers, and takes the time of each.

    python -m bench.pace HOST PORT RATE SECONDS < PATHS       prints {"ms": […], "wrong": {STATUS: COUNT}}

wrk asks again when it has been answered, so a server that is slow is asked less and looks better than it is. Here a
request's time begins when it is due, also when no connection is free for it by then. Threads, not a loop: the timers
of event loops go by the millisecond, which is most of what a tiny job takes.
"""

import json
import queue
import sys
import threading
import time
from collections import Counter

from bench.exchange import Ask, connect, exchange_on
from bench.serving import Address, BenchError

# Each has one request in flight.
_CONNECTIONS = 32


def pace(address: Address, paths: list[str], rate: float, seconds: float) -> tuple[list[float], Counter[str]]:
    """Milliseconds of each answer that was 200, and how many others came. Paths are asked for in turn."""
    due: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
    took_ms: list[float] = []
    wrong: Counter[str] = Counter()

    def ask() -> None:
        connection = connect(address)
        while (next := due.get()) is not None:
            at, path = next
            try:
                status = exchange_on(connection, address, Ask(path, 200, None)).status
            except BenchError as exc:
                wrong[str(exc)] += 1
                connection.close()
                connection = connect(address)
                continue
            if status == 200:
                took_ms.append((time.monotonic() - at) * 1e3)
            else:
                wrong[f"status {status}"] += 1
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(_CONNECTIONS)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    for number in range(int(rate * seconds)):
        at = began + number / rate
        time.sleep(max(0.0, at - time.monotonic()))
        due.put((at, paths[number % len(paths)]))
    for _ in threads:
        due.put(None)
    for thread in threads:
        thread.join()
    if lost := int(rate * seconds) - len(took_ms) - wrong.total():
        wrong["no connection"] += lost
    return took_ms, wrong


def main() -> None:
    host, port, rate, seconds = sys.argv[1:]
    took_ms, wrong = pace((host, int(port)), json.load(sys.stdin), float(rate), float(seconds))
    print(json.dumps({"ms": took_ms, "wrong": wrong}))


if __name__ == "__main__":
    main()
