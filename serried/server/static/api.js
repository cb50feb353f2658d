// Talks to the server: a streamed chat, and the engine's figures.

/** Streams a chat. onDelta gets {content, reasoning}; returns {reason, usage}. Throws an Error that says what is wrong. */
export async function chat(body, signal, onDelta) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await problem(response));
  let reason = null;
  let usage = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    onDelta(choice.delta);
    reason = choice.finish_reason ?? reason;
  }
  return { reason, usage };
}

/** The engine's figures, as /stats gives them; null while the model is being loaded. */
export async function stats() {
  const response = await fetch("/stats");
  if (response.status === 503) return null;
  if (!response.ok) throw new Error(await problem(response));
  return response.json();
}

async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((each) => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
