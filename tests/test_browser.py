"""The two pages for people, in a real Chromium."""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from playwright.sync_api import Browser, FilePayload, Locator, Page, Route, expect, sync_playwright

from bench import corpus
from tests.conftest import Server

_CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

OpenPage = Callable[..., Page]


# Of this module only: while Playwright is there, no other event loop runs in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        missing = "Chromium is not installed, so nobody looked at the pages (apt-get install chromium)."
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=_CHROMIUM_FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an address in a profile of its own; `java_script_enabled` and the like may be given."""
    contexts = []

    def open_(url: str, **options: object) -> Page:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def picture(zimg_photo: bytes) -> FilePayload:
    return {"name": "photo.jpg", "mimeType": "image/jpeg", "buffer": zimg_photo}


@pytest.fixture
def doomed(server: Server) -> str:
    """The MD5 of a stored image that no other test knows."""
    return server.upload(corpus.jpeg(corpus.photo(320, 200, seed=41)))


def listen(page: Page) -> list[str]:
    """What the page complains of from now on: errors in the console, refusals by the policy among them."""
    complaints: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    return complaints


def choose(page: Page, *files: FilePayload) -> Locator:
    """Choose files on the index page; their cards."""
    page.get_by_label(re.compile("choose", re.IGNORECASE)).set_input_files(list(files))
    return page.locator("#cards > li")


def expect_width(image: Locator, width: int) -> None:
    expect(image).to_have_js_property("complete", True)
    expect(image).to_have_js_property("naturalWidth", width)


# The index page


def test_the_form_works_without_javascript_and_ends_on_zimgs_result_page(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url, java_script_enabled=False)
    choose(page, picture)
    page.get_by_role("button", name="Upload", exact=True).click()
    md5 = hashlib.md5(picture["buffer"]).hexdigest()
    expect(page).to_have_title("Upload Result")
    expect(page.get_by_role("heading")).to_have_text(f"MD5: {md5}")
    page.get_by_role("link").click()
    expect(page).to_have_url(f"{server.url}/{md5}")
    expect_width(page.locator("img"), 640)


def test_the_form_without_javascript_takes_several_files_at_once(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    other: FilePayload = {**picture, "buffer": corpus.jpeg(corpus.photo(90, 60, seed=42))}
    page = open_page(server.url, java_script_enabled=False)
    choose(page, picture, other)
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.get_by_role("heading")).to_have_text(
        [f"MD5: {hashlib.md5(file['buffer']).hexdigest()}" for file in (picture, other)]
    )


def test_a_chosen_file_gets_a_card_with_its_thumbnail_ids_and_links(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url)
    complaints = listen(page)
    card = choose(page, picture)
    md5, sha256 = (hashlib.new(name, picture["buffer"]).hexdigest() for name in ("md5", "sha256"))
    thumbnail = card.get_by_alt_text("photo.jpg, the original")
    expect_width(thumbnail, 240)
    expect(thumbnail).to_have_js_property("naturalHeight", 240)
    expect(card.get_by_text("640 × 856 · image/jpeg")).to_be_visible()
    expect(card.get_by_text(md5, exact=True)).to_be_visible()
    expect(card.get_by_text(sha256, exact=True)).to_be_visible()
    assert server.get("/" + (card.get_by_text("Original").get_attribute("href") or "")).content == picture["buffer"]
    assert server.get("/" + (card.get_by_text("JSON info").get_attribute("href") or "")).json()["id"] == sha256
    expect(page.locator(".terminal")).to_contain_text(f'"{server.url}/{md5}?w=100&h=100&g=1"')
    expect(page.get_by_text("photo.jpg is uploaded.")).to_have_role("status")
    assert complaints == []


def test_the_playground_shows_the_rendition_that_its_controls_and_its_address_name(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url)
    complaints = listen(page)
    card = choose(page, picture)
    preview = card.get_by_alt_text("A rendition of photo.jpg")
    expect_width(preview, 320)
    card.get_by_label("Width").fill("150")
    expect_width(preview, 150)
    card.get_by_label("Height").fill("100")
    card.get_by_role("radio", name="stretch").check()
    card.get_by_label("Rotate").fill("90")
    card.get_by_label("Quality").fill("40")
    card.get_by_label("Format").select_option("webp")
    card.get_by_label("Grayscale").check()
    expect_width(preview, 100)
    expect(preview).to_have_js_property("naturalHeight", 150)
    address = card.locator("[data-rendition]").inner_text()
    md5 = hashlib.md5(picture["buffer"]).hexdigest()
    assert address == f"{server.url}/{md5}?w=150&h=100&p=0&g=1&r=90&q=40&f=webp"
    size = len(server.http.get(address).content)
    expect(card.get_by_text(f"100 × 150 · image/webp · {size:,} bytes")).to_be_visible()
    card.get_by_role("radio", name="percent").check()
    # Turned by 90 degrees, half of the height is what lies across.
    expect_width(preview, 428)
    assert complaints == []


def test_the_playground_tells_in_words_what_the_server_refuses(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url)
    card = choose(page, picture)
    card.get_by_label("Width").fill("99999")
    expect(card.get_by_role("status")).to_contain_text("w asks for 99999 × ")
    expect(card.get_by_alt_text("A rendition of photo.jpg")).to_be_hidden()
    card.get_by_label("Width").fill("64")
    expect_width(card.get_by_alt_text("A rendition of photo.jpg"), 64)


def test_a_text_file_shows_an_error_and_the_picture_beside_it_is_stored(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url)
    complaints = listen(page)
    cards = choose(page, {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"}, picture)
    failed, stored = cards.filter(has_text="notes.txt"), cards.filter(has_text="photo.jpg")
    expect(failed.get_by_text("This is not an image of a type taken here")).to_be_visible()
    expect_width(stored.get_by_alt_text("photo.jpg, the original"), 240)
    # Chromium itself notes every answer of 400 or more.
    assert [text for text in complaints if "status of 415" not in text] == []
    failed.get_by_role("button", name="Dismiss").click()
    expect(cards).to_have_count(1)


def test_a_file_name_that_holds_markup_is_shown_as_text(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    name = "<img src=x onerror=document.title='run'>.jpg"
    page = open_page(server.url)
    complaints = listen(page)
    card = choose(page, {**picture, "name": name})
    expect_width(card.get_by_alt_text("A rendition of"), 320)
    expect(card.get_by_role("heading")).to_have_text(name)
    expect(page).to_have_title("uvimg")
    assert complaints == []


def test_the_copy_button_puts_the_md5_into_the_clipboard(
    server: Server, open_page: OpenPage, picture: FilePayload
) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    card = choose(page, picture)
    card.get_by_role("button", name="Copy the MD5").click()
    expect(page.get_by_text("Copied.")).to_have_role("status")
    assert page.evaluate("navigator.clipboard.readText()") == hashlib.md5(picture["buffer"]).hexdigest()


def test_the_index_page_works_behind_a_prefix(server: Server, browser: Browser, picture: FilePayload) -> None:
    asked: list[str] = []

    def proxy(route: Route) -> None:
        asked.append(route.request.url)
        if not route.request.url.startswith(f"{server.url}/some/where/"):
            route.abort()
            return
        body = picture["buffer"] if route.request.method == "POST" else None
        route.fulfill(response=route.fetch(url=route.request.url.replace("/some/where/", "/"), post_data=body))

    with browser.new_context() as context:
        context.route("**", proxy)
        page = context.new_page()
        page.goto(f"{server.url}/some/where/")
        card = choose(page, picture)
        expect_width(card.get_by_alt_text("photo.jpg, the original"), 240)
        expect_width(card.get_by_alt_text("A rendition of photo.jpg"), 320)
        expect(page.locator(".terminal")).to_contain_text(f"{server.url}/some/where/upload")
    assert [url for url in asked if not url.startswith((f"{server.url}/some/where/", "blob:"))] == []


# The admin page


def test_the_admin_page_shows_an_image_and_deletes_it_only_after_a_second_yes(
    server: Server, open_page: OpenPage, doomed: str
) -> None:
    page = open_page(f"{server.url}/admin")
    complaints = listen(page)
    # The whole address of an image does as well.
    page.get_by_label("MD5").fill(f"{server.url}/{doomed}?w=100")
    expect(page.get_by_label("MD5")).to_have_value(doomed)
    # Fitted into 800 × 800.
    expect_width(page.get_by_alt_text("The image that would be deleted"), 800)
    page.get_by_role("button", name="Delete").click()
    sure = page.get_by_role("dialog")
    expect(sure).to_contain_text(doomed)
    sure.get_by_role("button", name="Keep it").click()
    expect(sure).to_be_hidden()
    assert server.get(f"/images/{doomed}/info").status_code == 200
    page.get_by_role("button", name="Delete").click()
    sure.get_by_role("button", name="Delete it").click()
    expect(page.get_by_role("status")).to_have_text(f"Deleted {doomed}.")
    assert server.get(f"/images/{doomed}/info").status_code == 404
    assert complaints == []


def test_the_admin_page_says_when_there_is_no_such_image(server: Server, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/admin")
    page.get_by_label("MD5").fill("0" * 32)
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("status")).to_have_text("There is no such image.")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_the_admin_form_deletes_without_javascript_as_zimgs_did(
    server: Server, open_page: OpenPage, doomed: str
) -> None:
    page = open_page(f"{server.url}/admin", java_script_enabled=False)
    page.get_by_label("MD5").fill(doomed)
    page.get_by_role("button", name="Delete").first.click()
    expect(page.get_by_role("heading")).to_have_text("Admin Command Successful!")
    assert server.get(f"/{doomed}").status_code == 404


@contextmanager
def other_site(page: str) -> Iterator[str]:
    """A site that shows this page at every address: localhost, which is not 127.0.0.1 to a browser."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://localhost:{site.server_port}/"
        finally:
            site.shutdown()


@pytest.mark.parametrize("trap", ['<img src="{command}">', '<iframe src="{command}"></iframe>'], ids=["image", "frame"])
def test_another_sites_page_cannot_delete_by_get(server: Server, open_page: OpenPage, doomed: str, trap: str) -> None:
    command = f"/admin?md5={doomed}&t=1"
    told = len(server.log)
    with other_site("<!doctype html>" + trap.format(command=server.url + command.replace("&", "&amp;"))) as url:
        # A page is loaded when all that it shows has come, or failed to.
        open_page(url)
    assert f"GET {command} 403 " in server.log[told:]
    assert server.get(f"/{doomed}").status_code == 200


def test_a_link_on_another_site_cannot_delete_either(server: Server, open_page: OpenPage, doomed: str) -> None:
    command = f"{server.url}/admin?md5={doomed}&amp;t=1"
    with other_site(f'<!doctype html><a href="{command}">Kittens</a>') as url:
        page = open_page(url)
        page.get_by_role("link").click()
        expect(page.get_by_role("heading")).to_have_text("403 Forbidden!")
    assert server.get(f"/{doomed}").status_code == 200
