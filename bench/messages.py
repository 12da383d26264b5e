"""What the echo client counted, as the columns of the published tables.

They are defined there so: the rate is messages over the nominal duration, the transfer counts one direction, and the
variation is the standard deviation of the latencies, also in percent of their mean.
"""

import math

import msgspec


class Counted(msgspec.Struct, frozen=True):
    """What `bench/clients/echo.c` prints. `histogram` has (step, messages), step n is from n · step_ns on."""

    messages: int
    seconds: float
    client_cpu_s: float
    sum_ns: float
    sum_of_squares_ns: float
    least_ns: int
    greatest_ns: int
    step_ns: int
    histogram: list[tuple[int, int]]


def summarise(counted: Counted, message_bytes: int) -> dict[str, float]:
    """Measure → value. There is at least one message."""
    mean = counted.sum_ns / counted.messages
    # Of all messages, not of a sample of them. Rounding may leave less than nothing.
    deviation = math.sqrt(max(0.0, counted.sum_of_squares_ns / counted.messages - mean * mean))
    rate = counted.messages / counted.seconds
    return {
        "rate": rate,
        "mib_s": rate * message_bytes / 2**20,
        "least_ms": counted.least_ns / 1e6,
        "mean_ms": mean / 1e6,
        "max_ms": counted.greatest_ns / 1e6,
        "deviation_ms": deviation / 1e6,
        "deviation_percent": deviation / mean * 100,
        "p50_ms": find_percentile(counted, 0.50) / 1e6,
        "p99_ms": find_percentile(counted, 0.99) / 1e6,
        "client": counted.client_cpu_s / counted.seconds * 100,
    }


def find_percentile(counted: Counted, share: float) -> float:
    """The latency in ns below which this share of the messages lies, to half a step."""
    wanted, seen = share * counted.messages, 0
    for step, number in counted.histogram:
        seen += number
        if seen >= wanted:
            return min(max((step + 0.5) * counted.step_ns, counted.least_ns), counted.greatest_ns)
    raise ValueError("the histogram holds fewer messages than were counted")
