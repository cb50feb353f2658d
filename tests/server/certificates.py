"""A certificate for loopback, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def certificate(folder: Path) -> tuple[str, str]:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    keyfile, certfile = str(folder / "key.pem"), str(folder / "cert.pem")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", keyfile, "-out", certfile]
    name = ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", "-x509", *new, *name], check=True, capture_output=True)
    return keyfile, certfile
