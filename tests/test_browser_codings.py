"""What a real Chromium makes of codings over TLS: zstd, and the difference to a version that it has (RFC 9842)."""

import base64
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Page, sync_playwright

from tests.conftest import Server

SCRIPT = "".join(f"export const word{number} = {number * number};\n" for number in range(20_000))


def fingerprint(certificate: Path) -> str:
    """What Chromium calls a key that it is to trust: dictionaries are kept from servers that it does trust alone."""
    public = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-pubkey"], capture_output=True, check=True
    ).stdout
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-outform", "der"], input=public, capture_output=True, check=True
    ).stdout
    return base64.b64encode(hashlib.sha256(der).digest()).decode()


@pytest.fixture
def page(certificate: Path, tmp_path: Path) -> Iterator[Page]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing = "Chromium is not installed, so nobody saw what it makes of codings (apt-get install chromium)."
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    flags.append(f"--ignore-certificate-errors-spki-list={fingerprint(certificate)}")
    with sync_playwright() as playwright:
        # With a profile: one without keeps no dictionaries.
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=chromium, args=flags
        )
        opened = context.new_page()
        opened.set_default_timeout(30_000)
        yield opened
        context.close()


def test_chromium_reads_zstd_over_tls_and_asks_for_the_difference_to_what_it_has(
    start_server: Callable[..., Server], certificate: Path, page: Page
) -> None:
    server = start_server(
        apps=("documents",),
        tls_certificate=certificate,
        tls_key=certificate,
        document_headers="Cache-Control: no-cache",
    )
    server.http.verify = str(certificate)
    url = f"https://localhost:{server.port}"

    def put(path: str, text: str, **headers: str) -> None:
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        answer: requests.Response = server.http.put(url + path, data=text.encode(), headers=fields)
        assert answer.status_code in (201, 204)

    put("/app/index.html", "<!DOCTYPE html><title>T</title>" + "<p>Said and said again.</p>" * 100)
    put("/app/v1.js", SCRIPT, Cache_Control="max-age=3600", Use_As_Dictionary='match="/app/*.js"')
    put("/app/v2.js", SCRIPT + "export const more = 1;\n", Cache_Control="max-age=3600")
    answer = page.goto(f"{url}/app/index.html")
    assert answer is not None
    assert answer.header_value("content-encoding") == "zstd"
    assert page.locator("p").count() == 100
    fetch = "async path => { const r = await fetch(path); return [r.headers.get('content-encoding'), await r.text()] }"
    assert page.evaluate(fetch, "/app/v1.js") == ["zstd", SCRIPT]
    # It puts the dictionary away when it has time.
    for number in range(100):
        coding, text = page.evaluate(fetch, f"/app/v2.js?{number}")
        assert text == SCRIPT + "export const more = 1;\n"
        if coding == "dcz":
            break
        page.wait_for_timeout(50)
    assert coding == "dcz"
