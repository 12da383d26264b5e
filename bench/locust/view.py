"""People who look at galleries: a page of 30 thumbnails, two of the pictures large, by browsers that remember.

    locust -f bench/locust/view.py --headless -u 100 -r 20 -t 60s --host http://127.0.0.1:4869

A browser asks over six connections at a time, takes from its cache what is there, and asks whether that is still good
when its user reloads. Rule: an answer has failed unless it is the picture that was asked for, in its size, the same
bytes that everybody else got.
"""

import hashlib
import random

from gevent.lock import BoundedSemaphore
from gevent.pool import Pool
from locust import between, task
from locust.contrib.fasthttp import FastHttpUser

from bench.locust import pictures

_CONNECTIONS = 6
_THUMBNAILS = 30
# Width and height that are asked for; both are met exactly.
_THUMBNAIL_SIZES = ((100, 100), (160, 120), (120, 160))
_LARGE_SIZES = ((640, 480), (800, 600))

# What everybody got, by path: the hash of the bytes.
_seen: dict[str, bytes] = {}
_uploading = BoundedSemaphore()
_uploaded: dict[str, list[str]] = {}


class Viewer(FastHttpUser):
    """One browser."""

    weight = 10
    wait_time = between(0.5, 2)
    concurrency = _CONNECTIONS

    def on_start(self) -> None:
        self._cache: dict[str, tuple[str, bytes]] = {}
        with _uploading:
            if self.host not in _uploaded:
                _uploaded[self.host] = [self._upload(data) for data in pictures.shown()]

    def _upload(self, data: bytes) -> str:
        headers = {"Content-Type": "image/jpeg"}
        with self.client.post(
            "/upload", data=data, headers=headers, name="upload for the gallery", catch_response=True
        ) as answer:
            image = pictures.md5(data)
            if answer.status_code != 200 or image not in (answer.text or ""):
                answer.failure(f"status {answer.status_code}, not stored as {image}")
            return image

    @task(6)
    def open_page(self) -> None:
        """Another page; some of its pictures have been seen before."""
        self._show(random.Random(random.randrange(40)), reload=False)

    @task(3)
    def reload_page(self) -> None:
        """The same again: is what I have still good?"""
        self._show(random.Random(random.randrange(40)), reload=True)

    @task(1)
    def forget(self) -> None:
        """Somebody else sits down here."""
        self._cache.clear()

    def _show(self, choice: random.Random, *, reload: bool) -> None:
        images = _uploaded[self.host]
        pool = Pool(_CONNECTIONS)
        wanted = [(choice.choice(images), choice.choice(_THUMBNAIL_SIZES), "thumbnail") for _ in range(_THUMBNAILS)]
        wanted += [(image, choice.choice(_LARGE_SIZES), "large") for image in choice.sample(images, 2)]
        for image, size, kind in dict.fromkeys(wanted):
            pool.spawn(self._get, image, size, kind, reload)
        pool.join()

    def _get(self, image: str, size: tuple[int, int], kind: str, reload: bool) -> None:
        path = f"/{image}?w={size[0]}&h={size[1]}"
        kept = self._cache.get(path)
        if kept and not reload:
            return
        headers = {"If-None-Match": kept[0]} if kept else {}
        name = f"{kind}, seen before" if kept else kind
        with self.client.get(path, headers=headers, name=name, catch_response=True) as answer:
            if kept and answer.status_code == 304:
                if answer.headers.get("etag") != kept[0]:
                    answer.failure("304 with another ETag")
                elif _seen.setdefault(path, kept[1]) != kept[1]:
                    answer.failure("304 although the bytes have changed")
                return
            if answer.status_code != 200:
                answer.failure(f"status {answer.status_code}")
                return
            body = answer.content
            digest = hashlib.sha256(body).digest()
            if path not in _seen:
                try:
                    got = pictures.measure(body)
                except ValueError as exc:
                    answer.failure(f"no picture: {exc}")
                    return
                if got != size:
                    answer.failure(f"{got[0]} × {got[1]} instead of {size[0]} × {size[1]}")
                    return
            if _seen.setdefault(path, digest) != digest:
                answer.failure("other bytes than before")
                return
            self._cache[path] = (answer.headers.get("etag", ""), digest)
