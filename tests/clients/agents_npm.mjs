// Tools and typed answers with npm packages: node agents_npm.mjs URL KEY, on a server as agents.py has it.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const model = "scripted", sunny = "It is sunny in Rome.";
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>';
async function says(prompt) {
  const headers = { "Authorization": `Bearer ${apiKey}`, "Content-Type": "application/json" };
  const body = JSON.stringify({ prompt, add_special_tokens: false });
  const reply = await fetch(`${url}/tokenize`, { method: "POST", headers, body });
  return `say [${JSON.stringify((await reply.json()).tokens)}]`;
}
const script = { call: await says(call), final: await says(sunny) };
const City = z.object({ kind: z.enum(["town", "village"]), size: z.number().int().min(1).max(9) });
const parameters = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};
const description = "The weather in a city.";
const look = ({ city }) => { assert.equal(city, "Rome"); return script.final; };

// OpenAI's client: the tool runner, typed answers of both APIs.
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({
    model, stream, messages: [{ role: "user", content: script.call }],
    tools: [{ type: "function", function: { name: "weather", description, parameters, function: look, parse: JSON.parse } }],
  });
  assert.equal(await runner.finalContent(), sunny);
}
const messages = [{ role: "user", content: "hi" }];
const typed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(City, "city") });
City.parse(typed.choices[0].message.parsed);
const parsed = await client.responses.parse({ model, input: "hi", text: { format: zodTextFormat(City, "city") } });
City.parse(parsed.output_parsed);
console.log("openai: tool runner streamed and whole, typed answers of both APIs");

// Vercel's AI SDK: its provider for compatible servers, and that for OpenAI (Responses).
const tools = { weather: tool({ description, inputSchema: z.object({ city: z.string() }), execute: look }) };
const providers = {
  compatible: createOpenAICompatible({ name: "octavo", baseURL, apiKey, supportsStructuredOutputs: true })(model),
  responses: createOpenAI({ baseURL, apiKey }).responses(model),
};
for (const [name, chosen] of Object.entries(providers)) {
  const asked = { model: chosen, tools, prompt: script.call, stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(asked);
  assert.equal(whole.text, sunny);
  assert.equal(whole.steps.length, 2);
  const streamed = streamText(asked);
  assert.equal((await streamed.steps).at(-1).text, sunny);
  City.parse((await generateObject({ model: chosen, schema: City, prompt: "hi", maxRetries: 0 })).object);
  console.log("AI SDK:", name, "tools whole and streamed, an object");
}

// Anthropic's client.
const claude = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const told = await claude.messages.stream({
  model, max_tokens: 200, messages: [{ role: "user", content: script.call }],
  tools: [{ name: "weather", description, input_schema: parameters }],
}).finalMessage();
assert.equal(told.stop_reason, "tool_use");
assert.deepEqual(told.content[0].input, { city: "Rome" });
console.log("anthropic: a streamed call");
