"""Settings: one declaration each, four sources, and documents that say the same."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from uvimg import config
from uvimg.config import ConfigError, load, to_environment

ROOT = Path(__file__).parent.parent


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_the_annotated_file_is_what_the_code_says() -> None:
    assert (ROOT / "conf/uvimg.toml").read_text() == config.to_toml()


def test_the_table_in_the_readme_is_what_the_code_says() -> None:
    found = re.search(
        r"<!-- settings:.*?-->\n(.*?)<!-- end of settings -->", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert found is not None
    assert found[1] == config.to_markdown()


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "quality = 10\nport = 1\nhost = 'file'\n")
    environment = {"UVIMG_PORT": "2", "UVIMG_HOST": "environment", "UVIMG_CONFIG": path, "HOME": "/"}
    settings = load({"host": "flag", "format": None}, environment)
    assert (settings.quality, settings.port, settings.host, settings.format) == (10, 2, "flag", "jpeg")
    other = write(tmp_path / "d.toml", "quality = 20\n")
    assert load({}, environment, other).quality == 20


def test_an_annotated_file_with_every_default_written_out_is_the_default(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", config.to_toml(), flags=re.MULTILINE)
    assert len(re.findall(r"^\w+ = ", text, re.MULTILINE)) == len(config.declarations())
    assert load({}, {}, write(tmp_path / "c.toml", text)) == load({}, {})


def test_what_config_prints_can_be_read_back(tmp_path: Path) -> None:
    changed = {
        "quality": "33",
        "max_size": "3 MiB",
        "disable_args": "true",
        "image_headers": ["Cache-Control: public, max-age=1", 'X: "quoted"'],
        "trusted_proxies": "10.0.0.0/8,::1",
        "store": 'local:/a "strange" path',
        "listen": "127.0.0.1:0, [::1]:80, :8080, unix:/run/a b.sock, fd:3",
    }
    settings = load(changed, {})
    assert load({}, {}, write(tmp_path / "c.toml", config.to_toml(settings))) == settings
    assert set(config.changed(settings)) == set(changed)
    assert settings.max_size == 3 << 20


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("quality", "101", "a whole number from 1 to 100"),
        ("quality", "high", "a whole number from 1 to 100"),
        ("quality", True, "a whole number from 1 to 100"),
        ("port", "-1", "from 0 to 65535"),
        ("format", "jxl", "jpeg, png, webp, gif, avif, none"),
        ("save_new", "3", "0, 1, 2"),
        ("save_new", True, "0, 1, 2"),
        ("max_size", "5 parsecs", "a size such as '100 MiB'"),
        ("max_size", "0", "of at least 1 B"),
        ("worker_timeout_s", "nan", "a number of at least 0.1"),
        ("disable_args", "maybe", "true or false"),
        ("allowed_types", "jpeg,exe", "any of jpeg, png"),
        ("allowed_types", "", "any of jpeg, png"),
        ("apps", ["cats"], "any of images, kv"),
        ("store", "ftp://x", "local:DIR or memory:"),
        ("background", "white", "#rrggbb"),
        ("upload_rule", "permit all", "allow or deny"),
        ("admin_rule", "allow 300.0.0.1", "not an address"),
        ("trusted_proxies", "10.0.0.0/99", "not an address"),
        ("image_headers", ["X: a\r\nSet-Cookie: b"], "'Name: value'"),
        ("image_headers", ["no colon"], "'Name: value'"),
        ("image_headers", ["Content-Length: 3"], "for uvimg to say"),
        ("grace_s", "inf", "a number of at least 0"),
        ("index_page", "/no/such/file", "no such file"),
        ("listen", "4869", "HOST:PORT, [::1]:PORT, :PORT, unix:/path or fd:N"),
        ("listen", "unix:here", "unix:/path"),
        ("listen", ["[::1:80"], "[::1]:PORT"),
        ("listen", "::1:80", "[::1]:PORT"),
        ("listen", "x:65536", "HOST:PORT"),
        ("listen", ":80,:80", ":80 is there twice"),
        ("listen", "fd:2", "begin at fd:3"),
        ("listen", "unix:/" + "a" * 107, "at most 107 bytes"),
    ],
)
def test_a_value_that_cannot_be_names_key_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value}, {})
    assert name in str(caught.value)
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kwality = 3", "unknown setting kwality"),
        ("quality = = 3", "line 1"),
        ("quality = '75 '", None),
        ("quality = 7.5", "quality = 7.5"),
        ("[images]\nquality = 3", "unknown setting images"),
        ("save_new = 2", None),
        ("max_size = 1_000_000", None),
    ],
)
def test_a_file_is_judged_like_any_source(tmp_path: Path, text: str, told: str | None) -> None:
    path = write(tmp_path / "c.toml", text)
    if told is None:
        load({}, {}, path)
        return
    with pytest.raises(ConfigError) as caught:
        load({}, {}, path)
    assert told in str(caught.value)
    assert path in str(caught.value)


def test_an_unknown_variable_of_ours_is_an_error_and_others_are_not() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting qualty .*UVIMG_QUALTY"):
        load({}, {"UVIMG_QUALTY": "3"})
    assert load({}, {"QUALITY": "3"}) == load({}, {})
    # Whoever embeds it types the names himself.
    with pytest.raises(ConfigError, match=r"unknown setting qualty"):
        load({"qualty": 3}, {})


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["serve", "--quality", "0"], 2, "quality"),
        (["serve", "cats"], 2, "apps = ['cats']"),
        (["serve", "--config", "/no/such.toml"], 2, "/no/such.toml"),
        (["serve", "--port", "0", "--store", "local:/proc/nothing"], 1, "cannot be opened"),
        (["serve", "--store", "memory:", "--host", "192.0.2.1", "--workers", "1"], 1, "cannot listen on 192.0.2.1"),
        (["serve", "--operations-listen", "localhost"], 2, "operations_listen = ['localhost']"),
        (["serve", "--store", "memory:", "--port=0", "--operations-listen=192.0.2.1:1"], 1, "listen on 192.0.2.1:1"),
        (["serve", "--store", "memory:", "--port=0", "--metrics-dir=/proc/nothing"], 1, "metrics_dir cannot be used"),
        (["serve", "--port", "0", "--processes", "1", "--store", "local:/proc/nothing"], 1, "cannot be opened"),
        (["serve", "--listen=fd:9", "--operations-listen=fd:9"], 2, "both name fd:9"),
        (["serve", "--processes", "2", "--store", "memory:"], 2, "a memory: store of its own"),
        (["serve", "--processes", "2", "--host", "192.0.2.1"], 1, "cannot listen on 192.0.2.1:4869"),
        (["scrub", "--store", "local:/proc/nothing"], 1, "There is no store in /proc/nothing"),
        (["scrub", "--store", "memory:"], 2, "nothing to look at"),
        (["gc", "--store", "nonsense"], 2, "store"),
        (["serve", "--nonsense"], 2, "--nonsense"),
    ],
)
def test_the_command_line_complains_in_one_line_without_a_traceback(
    arguments: list[str], status: int, told: str
) -> None:
    done = subprocess.run([sys.executable, "-m", "uvimg", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_environment_says_all_settings() -> None:
    changed = load(
        {"listen": "127.0.0.1:1,unix:/x", "access_log": False, "max_size": "1 MiB", "grace_s": "1.5", "quality": 1}, {}
    )
    for settings in (load({}, {}), changed):
        assert load({}, to_environment(settings)) == settings


@pytest.mark.parametrize("command", [[], ["serve"], ["put"], ["scrub"], ["gc"], ["config"]])
def test_every_command_has_a_help_that_names_its_settings(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uvimg", *command, "--help"], capture_output=True, text=True, check=True
    )
    names = config.declarations() if command in (["serve"], ["config"]) else ()
    for declaration in names:
        flag = declaration.name if declaration.positional else "--" + declaration.name.replace("_", "-")
        assert flag in done.stdout or "images" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
