"""Programs that keep small values: sessions, counters, settings; many reads for each write.

    locust -f bench/locust/keyvalue.py --headless -u 100 -r 20 -t 60s --host http://127.0.0.1:4869

Rule: each user has keys of its own and knows what stands there, so every answer is held against that; what was
answered is there for the very next request.
"""

import random
import uuid
from typing import Any

from locust import between, task
from locust.contrib.fasthttp import FastHttpUser

_KEYS = 50


class KeyValueUser(FastHttpUser):
    weight = 5
    wait_time = between(0.05, 0.3)

    def on_start(self) -> None:
        self._folder = f"/kv/locust/{uuid.uuid4().hex}."
        self._values: dict[str, tuple[bytes, str]] = {}

    @task(60)
    def read(self) -> None:
        key = self._choose()
        with self.client.get(self._folder + key, name="get", catch_response=True) as answer:
            self._check(answer, self._values.get(key))

    @task(10)
    def read_again(self) -> None:
        """Is what I have still good?"""
        key = self._choose()
        known = self._values.get(key)
        headers = {"If-None-Match": known[1]} if known else {}
        with self.client.get(self._folder + key, headers=headers, name="get if changed", catch_response=True) as answer:
            if known and answer.status_code == 304:
                answer.success()
            elif known:
                answer.failure(f"status {answer.status_code} instead of 304")
            else:
                self._check(answer, None)

    @task(10)
    def write(self) -> None:
        key, value = self._choose(), random.randbytes(random.choice((20, 290, 290, 290, 3000, 200_000)))
        wanted = 200 if key in self._values else 201
        with self.client.put(self._folder + key, data=value, name="put", catch_response=True) as answer:
            if answer.status_code != 201 and answer.status_code != wanted:
                answer.failure(f"status {answer.status_code} instead of {wanted}")
                return
        with self.client.get(self._folder + key, name="get what was put", catch_response=True) as answer:
            self._check(answer, (value, ""))
            self._values[key] = (value, answer.headers.get("etag", ""))

    @task(3)
    def write_if_unchanged(self) -> None:
        """Compare and set: with the right ETag it goes, with an old one it must not."""
        key = self._choose()
        if key not in self._values:
            return
        value, headers = random.randbytes(100), {"If-Match": '"0123456789abcdef"'}
        with self.client.put(
            self._folder + key, data=value, headers=headers, name="put on an old ETag", catch_response=True
        ) as answer:
            if answer.status_code == 412:
                answer.success()
            else:
                answer.failure(f"status {answer.status_code} instead of 412")
        with self.client.get(self._folder + key, name="get what was not put", catch_response=True) as answer:
            self._check(answer, self._values[key])

    @task(3)
    def delete(self) -> None:
        key = self._choose()
        wanted = (200, 204) if key in self._values else (404,)
        with self.client.delete(self._folder + key, name="delete a value", catch_response=True) as answer:
            if answer.status_code in wanted:
                answer.success()
            else:
                answer.failure(f"status {answer.status_code}, not {wanted}")
        self._values.pop(key, None)
        with self.client.get(self._folder + key, name="get what was deleted", catch_response=True) as answer:
            self._check(answer, None)

    @task(1)
    def list(self) -> None:
        """All of my keys, in order, and nobody else's."""
        with self.client.get(f"{self._folder}/_match", name="match a prefix", catch_response=True) as answer:
            prefix = self._folder.rpartition("/")[2]
            wanted = "\n".join(sorted(prefix + key for key in self._values))
            status = 200 if wanted else 404
            if answer.status_code != status or (wanted and answer.text.rstrip("\n") != wanted):
                answer.failure(f"status {answer.status_code}, other keys than were put")
            else:
                answer.success()

    def _choose(self) -> str:
        """Some keys are everybody's darlings."""
        return f"{min(int(random.paretovariate(1)), _KEYS):02}"

    def _check(self, answer: Any, wanted: tuple[bytes, str] | None) -> None:
        if wanted is None and answer.status_code == 404:
            answer.success()
        elif wanted is None or answer.status_code != 200:
            answer.failure(f"status {answer.status_code}")
        elif (answer.content or b"") != wanted[0]:
            answer.failure(f"another value: {len(answer.content or b'')} bytes of {len(wanted[0])}")
