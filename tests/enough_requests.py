"""A locustfile beside another one: the end of its run, once there were enough requests, and what was counted.

A run of so many seconds is too long where the machine is quiet, and on a busy one perhaps over before it has begun.
locust's own files of figures are written every few seconds, and may miss the end.
"""

import json
import os
from pathlib import Path
from typing import Any

import gevent
from locust import events

_ENOUGH = 200


@events.init.add_listener
def _count_requests(environment: Any, **_: object) -> None:
    seen = 0

    def count(**_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == _ENOUGH:
            gevent.spawn(environment.runner.quit)

    environment.events.request.add_listener(count)


@events.quitting.add_listener
def _tell_counts(environment: Any, **_: object) -> None:
    stats = environment.stats
    rows = {entry.name: (entry.num_requests, entry.num_failures) for entry in stats.entries.values()}
    rows["all"] = (stats.total.num_requests, stats.total.num_failures)
    Path(os.environ["COUNTS_FILE"]).write_text(json.dumps(rows))
