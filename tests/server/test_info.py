"""What the server says of itself, and its page."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import openai
import pytest
from fakes import FakeEngine, Served, served, tiny_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from serried import __version__
from serried.errors import EngineDead

HELLO = [{"role": "user", "content": "Hello"}]


def metrics(http: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_health_and_ready(server: Served, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "engine": "up"}
    assert http.get("/ready").json() == {"status": "ready"}
    server.engine.ready_error = EngineDead("rank 1 has not answered for 30 s")
    response = http.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert "rank 1" in response.json()["error"]["message"]
    assert http.get("/health").status_code == 200  # being alive is not being ready
    server.engine.failure = "it has died three times"
    response = http.get("/health")
    assert (response.status_code, response.json()["reason"]) == (503, "it has died three times")


def test_version_and_models(http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.get("/version").json() == {"version": __version__}
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "serried")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_served_names() -> None:
    with served(served_model_name=("a", "org/b")) as server, httpx.Client(base_url=server.url) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["a", "org/b"]
        assert http.get("/v1/models/org/b").json()["root"] == "tiny"
        for name, status, answered in (("a", 200, "a"), ("org/b", 200, "org/b"), (None, 200, "a"), ("tiny", 404, None)):
            response = http.post("/v1/completions", json={"prompt": "x", "model": name})
            assert (response.status_code, response.json().get("model")) == (status, answered)


def test_every_response_has_an_id(http: httpx.Client) -> None:
    ids = {http.get(path).headers["x-request-id"] for path in ("/health", "/nothing", "/v1/models")}
    assert len(ids) == 3


def test_metrics(server: Served, http: httpx.Client) -> None:
    before = metrics(http)
    assert http.post("/v1/completions", json={"prompt": "one two", "max_tokens": 8}).status_code == 200
    assert http.post("/v1/completions", json={"prompt": ""}).status_code == 400
    server.engine.say = lambda prompt, index: "a STOP b"
    http.post("/v1/completions", json={"prompt": "one two", "stop": "STOP"})
    after = metrics(http)

    def grown(name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    assert grown("serried_time_to_first_token_seconds_count") == 2
    assert grown("serried_time_per_output_token_seconds_count") == 2
    assert grown("serried_inter_token_latency_seconds_count") == 7 + 5
    assert grown("serried_e2e_request_latency_seconds_count") == 2
    assert grown("serried_request_generation_tokens_sum") == 8 + 6
    assert grown("serried_requests_finished_total", reason="length") == 1
    assert grown("serried_requests_finished_total", reason="stop") == 1
    assert grown("serried_http_responses_total", path="/v1/completions", status="200") == 2
    assert grown("serried_http_responses_total", path="/v1/completions", status="400") == 1
    assert after["serried_kv_cache_usage", ()] == 0.1
    assert after["serried_kv_blocks_total", ()] == 50
    assert after["serried_rank_collective_share", (("rank", "0"),)] == 0.25
    assert after["serried_rank_seconds_total", (("activity", "idle"), ("rank", "1"))] == 2.0
    for name in ("requests_running", "requests_waiting", "prefix_cache_hits_total", "prefix_cache_queries_total"):
        assert (f"serried_{name}", ()) in after


def test_a_path_of_the_clients_choosing_is_no_label(http: httpx.Client) -> None:
    http.get("/some/path/that/nobody/has")
    assert not any("nobody" in value for _, labels in metrics(http) for _, value in labels)


def test_stats(http: httpx.Client) -> None:
    reply = http.get("/stats").json()
    assert (reply["model"], reply["max_model_len"]) == ("tiny", 2048)
    assert reply["stats"]["blocks_total"] == 50
    assert reply["stats"]["ranks"][1] == {"rank": 1, "compute": 5.0, "collective": 3.0, "idle": 2.0}


def test_tokenize_and_back(http: httpx.Client) -> None:
    tokenizer = tiny_tokenizer()
    reply = http.post("/tokenize", json={"prompt": "one two 😀", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer.encode("one two 😀")
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), 2048)
    assert reply["token_strs"][0] == "one"
    assert http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "one two 😀"}
    chat = http.post("/tokenize", json={"messages": HELLO}).json()
    assert tokenizer.decode(chat["tokens"], skip_special=False).endswith("<|im_start|>assistant\n")


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    found = {"index.html"}
    for path in re.findall(r'(?:src|href)="([^"]+)"', page.text):
        assert path.startswith("/static/")
        response = http.get(path)
        assert response.status_code == 200
        found.add(path.removeprefix("/static/"))
        for other in re.findall(r'from "\./([^"]+)"', response.text):
            assert http.get(f"/static/{other}").headers["content-type"].startswith("text/javascript")
            found.add(other)
    own = {each.name for each in (files("serried.server") / "static").iterdir()}
    assert found == own
    for name in own:
        text = http.get(f"/static/{name}").text
        outside = [url for url in re.findall(r"https?://[^\s\"'<>)]+", text) if "www.w3.org/2000/svg" not in url]
        assert not outside


def test_scripts_and_styles_are_apart_from_the_page(http: httpx.Client) -> None:
    """The policy would block them inside."""
    page = http.get("/").text
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=", page)
    assert "innerHTML" not in http.get("/static/app.js").text + http.get("/static/text.js").text


def test_the_engine_is_closed_with_the_server() -> None:
    engine = FakeEngine()
    with served(engine):
        assert not engine.closed
    assert engine.closed
