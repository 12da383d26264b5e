"""A locustfile beside another one: the end of its run, once there were enough requests.

A run of so many seconds is too long where the machine is quiet, and on a busy one perhaps over before it has begun.
"""

import gevent
from locust import events

_ENOUGH = 200


@events.init.add_listener
def _count_requests(environment: object, **_: object) -> None:
    seen = 0

    def count(**_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == _ENOUGH:
            gevent.spawn(environment.runner.quit)  # type: ignore[attr-defined]

    environment.events.request.add_listener(count)  # type: ignore[attr-defined]
