// Shows a little Markdown: fenced code, headings, bold, inline code. Everything becomes text nodes, never HTML.

/** Nodes for a text. An open fence, as it comes in a stream, is code to its end. */
export function render(text) {
  const nodes = [];
  text.split(/^```/m).forEach((part, number) => {
    if (number % 2 === 0) {
      nodes.push(...prose(part));
      return;
    }
    const code = document.createElement("code");
    code.textContent = part.replace(/^[^\n]*\n?/, "").replace(/\n$/, "");
    const block = document.createElement("pre");
    block.append(code);
    nodes.push(block);
  });
  return nodes;
}

function prose(text) {
  const nodes = [];
  for (const paragraph of text.split(/\n{2,}/)) {
    const trimmed = paragraph.replace(/^\n+|\n+$/g, "");
    if (!trimmed) continue;
    const heading = /^#{1,6} +(.*)$/.exec(trimmed);
    const node = document.createElement(heading ? "h3" : "p");
    node.append(...inline(heading ? heading[1] : trimmed));
    nodes.push(node);
  }
  return nodes;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    const code = part.startsWith("`") && part.length > 2;
    const bold = part.startsWith("**") && part.length > 4;
    if (!code && !bold) return document.createTextNode(part);
    const node = document.createElement(code ? "code" : "strong");
    node.textContent = code ? part.slice(1, -1) : part.slice(2, -2);
    return node;
  });
}
