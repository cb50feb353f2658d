"""Answer two prompts with a small real model, split over two ranks."""

from serried import LLM, SamplingParams

with LLM("demo", tensor_parallel_size=2) as llm:
    prompts = ["The capital of France is", "Once upon a time"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    question = [{"role": "user", "content": "Name three rivers, separated by commas."}]
    print(llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text)
