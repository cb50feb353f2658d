"""Scores servers by lm_eval, offline: `lm_eval_script.py FOLDER TOKENIZER RUNS` prints a JSON list, one for each run.

RUNS is a JSON list of {"url", "tasks", and options of lm_eval's model}. FOLDER holds the tasks and the data. It is a
process of its own since lm_eval reads the environment when it is imported.
"""

from __future__ import annotations

import json
import os
import sys

folder, tokenizer, runs = sys.argv[1:]
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=f"{folder}/hf", OPENAI_API_KEY="secret", TOKENIZERS_PARALLELISM="false")

import lm_eval  # noqa: E402
from lm_eval import evaluator  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

evaluator.add_env_info = lambda results: None  # a list of all packages and of the machine, which takes seconds


def scores(url: str, tasks: list[str], **options: object) -> dict[str, object]:
    model = {"base_url": f"{url}/v1/completions", "model": "tiny", "tokenizer": tokenizer, "max_length": 128}
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={**model, "tokenizer_backend": "huggingface", "max_retries": 1, **options},
        tasks=tasks,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {task: [each["resps"] for each in found["samples"][task]] for task in tasks}
    return {"results": found["results"], "samples": samples}


print("RESULT", json.dumps([scores(**run) for run in json.loads(runs)]))
