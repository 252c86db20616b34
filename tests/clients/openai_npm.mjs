// The npm package `openai` against a running server: node openai_npm.mjs BASE_URL KEY
// Exits with 1 at the first thing that is not as the package's own types say.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "Why is the sky blue?" }];
const asked = { model, messages, temperature: 0, max_completion_tokens: 24 };

const whole = await client.chat.completions.create(asked);
const said = whole.choices[0].message.content;
assert.equal(whole.object, "chat.completion");
assert.equal(whole.choices[0].message.role, "assistant");
assert.ok(["stop", "length"].includes(whole.choices[0].finish_reason));
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
console.log("chat:", JSON.stringify(said));

let text = "", chunks = 0, usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...asked, ...options })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
  chunks += 1;
}
assert.equal(text, said);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
console.log("streamed:", chunks, "chunks, the same text, usage", usage.completion_tokens);

const runner = client.chat.completions.stream(asked);
assert.equal(await runner.finalContent(), said);

const scored = await client.chat.completions.create({
  ...asked, logprobs: true, top_logprobs: 3, n: 2, temperature: 0.8, seed: 7,
});
assert.equal(scored.choices.length, 2);
assert.notEqual(scored.choices[0].message.content, scored.choices[1].message.content);
for (const choice of scored.choices)
  for (const entry of choice.logprobs.content) {
    assert.equal(entry.top_logprobs.length, 3);
    assert.ok(entry.logprob <= 0 && Number.isFinite(entry.logprob));
    assert.ok(Array.isArray(entry.bytes));
  }
console.log("n=2 with logprobs:", scored.choices[0].logprobs.content.length, "entries");

const turn = { model, input: "Why is the sky blue?", temperature: 0, max_output_tokens: 24 };
const response = await client.responses.create(turn);
assert.equal(response.object, "response");
assert.equal(response.output_text, said);
assert.equal(response.usage.total_tokens, response.usage.input_tokens + response.usage.output_tokens);
let told = "", kinds = [];
for await (const event of await client.responses.create({ ...turn, stream: true })) {
  assert.equal(event.sequence_number, kinds.length);
  kinds.push(event.type);
  if (event.type === "response.output_text.delta") told += event.delta;
}
assert.equal(told, said);
assert.equal(kinds[0], "response.created");
assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
console.log("response:", kinds.length, "events, the same text,", response.status);

const prompt = "The capital of Italy is";
const legacy = await client.completions.create({ model, prompt, max_tokens: 4, temperature: 0, logprobs: 1 });
assert.equal(legacy.object, "text_completion");
assert.equal(legacy.choices[0].logprobs.tokens.length, 4);
let parts = "";
for await (const part of await client.completions.create({ model, prompt, max_tokens: 4, temperature: 0, stream: true }))
  parts += part.choices[0]?.text ?? "";
assert.equal(parts, legacy.choices[0].text);
console.log("completion:", JSON.stringify(legacy.choices[0].text));

async function refused(kind, code, make) {
  await assert.rejects(make, (error) => {
    assert.ok(error instanceof kind, `${error.constructor.name} is not ${kind.name}`);
    assert.equal(error.code, code);
    return true;
  });
  console.log("typed error:", kind.name, code);
}
const chat = (more, who = client) => () => who.chat.completions.create({ ...asked, ...more });
await refused(OpenAI.NotFoundError, "model_not_found", chat({ model: "other" }));
await refused(OpenAI.BadRequestError, "invalid_value", chat({ temperature: 3 }));
await refused(OpenAI.BadRequestError, "invalid_value", chat({ tools: [{ type: "function", function: { name: "f" } }] }));
await refused(OpenAI.BadRequestError, "context_length_exceeded", chat({ max_completion_tokens: 10_000_000 }));
const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
await refused(OpenAI.AuthenticationError, "invalid_api_key", chat({}, stranger));

const stop = new AbortController();
const stream = await client.chat.completions.create(
  { ...asked, max_completion_tokens: 400, stream: true }, { signal: stop.signal });
for await (const _ of stream) { stop.abort(); break; }
console.log("aborted a stream; the server still answers:", (await client.models.list()).data.length, "model");
