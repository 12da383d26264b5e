"""Certificates and keys that will not do are one readable line each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import make_certificate
from uvimg.config import ConfigError, load
from uvimg.web.tls import make_context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    for name, options in (("own", ()), ("other", ()), ("encrypted", ("-passout", "pass:secret"))):
        (made / name).mkdir()
        make_certificate(made / name, *options)
    (made / "nonsense.pem").write_text("nonsense")
    return made


@pytest.mark.parametrize(
    ("certificate", "key", "told"),
    [
        ("own/certificate.pem", "missing.pem", "missing.pem: No such file"),
        ("missing.pem", "own/key.pem", "missing.pem: No such file"),
        ("own/certificate.pem", "other/key.pem", "does not belong to the certificate"),
        ("own/certificate.pem", "encrypted/key.pem", "is encrypted"),
        ("nonsense.pem", "own/key.pem", "no certificate and key in PEM"),
        ("own/certificate.pem", "nonsense.pem", "no certificate and key in PEM"),
    ],
)
def test_what_is_wrong_with_them_is_told(folder: Path, certificate: str, key: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        make_context(str(folder / certificate), str(folder / key))
    assert "\n" not in str(caught.value)


def test_one_without_the_other_is_a_mistake(folder: Path) -> None:
    for name in ("tls_certificate", "tls_key"):
        with pytest.raises(ConfigError, match="go together"):
            load({name: str(folder / "own/key.pem")}, {})


def test_the_command_line_complains_in_one_line(folder: Path) -> None:
    flags = (f"--tls-certificate={folder}/own/certificate.pem", f"--tls-key={folder}/other/key.pem")
    done = subprocess.run(
        [sys.executable, "-m", "uvimg", "serve", "--port=0", "--store=memory:", "--workers=1", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "tls_certificate and tls_key: the key in" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
