"""Schemathesis over /openapi.json: what it makes of the description gives no 5xx, and no answer of another kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fakes import THINKS, FakeEngine, Served, served
from needs import need
from serving import address, process, wait_until_ready
from tiny_models import Models

need("schemathesis")
CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"),
    *("unsupported_method", "missing_required_header", "negative_data_rejection"),
]


def run(url: str, folder: Path, seconds: int, *words: str) -> str:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += [
        "--max-time",
        str(seconds),
        "--continue-on-failure",
        "--no-color",
        "--warnings",
        "off",
        "--request-timeout",
        "120",
    ]
    command += words
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=60 + 2 * seconds
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_the_description(server: Served) -> None:
    """It is there, tells of every route, and behind a key it is behind the key; its pages, from elsewhere, are not."""
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(paths)
    answers = paths["/v1/messages"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"} and "4XX" in answers
    for path in ("/docs", "/redoc"):
        assert httpx.get(f"{server.url}{path}").status_code == 404
    with served(api_key=("k",)) as locked:
        assert httpx.get(f"{locked.url}/openapi.json").status_code == 401


def test_a_few_seconds(tmp_path: Path) -> None:
    with served(FakeEngine(template=THINKS)) as server:
        said = run(server.url, tmp_path, 6, "--phases", "coverage,fuzzing", "--seed", "1")
        assert "Selected: 14/14" in said
        assert server.idle()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_minutes_on_a_real_engine(tiny: Models, tmp_path: Path) -> None:
    with process(
        str(tiny.directory("split-text")), "-tp", "2", "--threads-per-rank", "1", "--max-model-len", "256"
    ) as started:
        url = address(started)
        wait_until_ready(url, started)
        run(url, tmp_path, 240)
        assert httpx.get(f"{url}/ready").status_code == 200
        assert httpx.get(f"{url}/stats").json()["stats"]["restarts"] == 0
