"""People who upload: files of all formats and sizes, in each of the ways that clients do it, and look at them at once.

    locust -f bench/locust/upload.py --headless -u 20 -r 5 -t 60s --host http://127.0.0.1:4869

Rule: an upload has succeeded when the server names the file's own hash and gives back the very bytes. What is no
picture must be refused. Everything is deleted again (that takes a host that may: the loopback, by default).
"""

import random
from typing import Any

from locust import between, task
from locust.contrib.fasthttp import FastHttpUser

from bench.locust import pictures


class Uploader(FastHttpUser):
    weight = 1
    wait_time = between(0.2, 1)

    @task(4)
    def as_body(self) -> None:
        """zimg's clients: the file is the body."""
        format, _, data = pictures.another(random.randrange(pictures.count_kinds()))
        with self.client.post(
            "/upload", data=data, headers={"Content-Type": format}, name="upload as body", catch_response=True
        ) as answer:
            self._check(answer, 200, lambda told: told["info"]["md5"] == pictures.md5(data))
        self._look(data)

    @task(2)
    def as_image(self) -> None:
        """Today's clients: a new image below /images."""
        _, media_type, data = pictures.another(random.randrange(pictures.count_kinds()))
        with self.client.post(
            "/images", data=data, headers={"Content-Type": media_type}, name="upload to /images", catch_response=True
        ) as answer:
            self._check(answer, 201, lambda told: told["md5"] == pictures.md5(data) and told["size"] == len(data))
        self._look(data)

    @task(2)
    def as_form(self) -> None:
        """Browsers: some files in a form."""
        files = [pictures.another(random.randrange(pictures.count_kinds())) for _ in range(3)]
        boundary = f"locust-{random.getrandbits(64):x}"
        body = b"".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="userfile"; filename="{number}.{format}"\r\n'
            f"Content-Type: {media_type}\r\n\r\n".encode()
            + data
            + b"\r\n"
            for number, (format, media_type, data) in enumerate(files)
        )
        with self.client.post(
            "/upload",
            data=body + f"--{boundary}--\r\n".encode(),
            headers={"Content-Type": f"multipart/form-data; boundary={boundary}", "Accept": "application/json"},
            name="upload a form",
            catch_response=True,
        ) as answer:
            wanted = [pictures.md5(data) for _, _, data in files]
            self._check(answer, 200, lambda told: [entry.get("md5") for entry in told["info"]] == wanted)
        for _, _, data in files:
            self._look(data)

    @task(1)
    def no_picture(self) -> None:
        """What is no picture is refused, whatever it says it is."""
        with self.client.post(
            "/upload",
            data=random.randbytes(random.randrange(1, 5000)),
            headers={"Content-Type": "jpeg"},
            name="upload what is no picture",
            catch_response=True,
        ) as answer:
            self._check(answer, 200, lambda told: told["ret"] is False and told["error"]["code"] == 1)

    def _check(self, answer: Any, status: int, is_right: Any) -> None:
        try:
            right = answer.status_code == status and is_right(answer.json())
        except (ValueError, KeyError, TypeError):
            right = False
        if right:
            answer.success()
        else:
            answer.failure(f"status {answer.status_code}: {(answer.text or '')[:200]}")

    def _look(self, data: bytes) -> None:
        """The original, to the byte, a thumbnail, and away with it."""
        image = pictures.md5(data)
        with self.client.get(f"/{image}?p=0", name="the original", catch_response=True) as answer:
            if answer.status_code != 200 or answer.content != data:
                answer.failure(f"status {answer.status_code}, {len(answer.content or b'')} bytes of {len(data)}")
        with self.client.get(f"/{image}?w=50&h=50&f=jpeg", name="its thumbnail", catch_response=True) as answer:
            try:
                size = pictures.measure(answer.content or b"")
            except ValueError:
                size = None
            if answer.status_code != 200 or size != (50, 50):
                answer.failure(f"status {answer.status_code}, size {size}")
        with self.client.delete(f"/images/{image}", name="delete", catch_response=True) as answer:
            if answer.status_code != 204:
                answer.failure(f"status {answer.status_code}")
        with self.client.get(f"/{image}?p=0", name="what was deleted", catch_response=True) as answer:
            if answer.status_code == 404:
                answer.success()
            else:
                answer.failure(f"status {answer.status_code} after its deletion")
