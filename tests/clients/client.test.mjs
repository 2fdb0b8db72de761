// openai, @anthropic-ai/sdk, ollama and the AI SDK with two providers, by node's own test runner.
// The daemon's address is in APPLIANCE; tests of cancelling hang up and name the model.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import { createOllama } from "ollama-ai-provider-v2";
import OpenAI from "openai";
import { z } from "zod";

const url = process.env.APPLIANCE;
const ANSWER = "It is sunny.";
const BOOKED = [
  { city: "Rome", nights: 2 },
  { city: "Bonn", nights: 3 },
];
const messages = [{ role: "user", content: "Hello" }];
const Stay = z.object({ city: z.enum(["Rome", "Bonn"]), nights: z.literal([1, 2, 3]) });
const schema = z.toJSONSchema(Stay);
const tools = [{ type: "function", function: { name: "book", parameters: schema } }];

async function cancelled() {
  const text = await (await fetch(`${url}/metrics`)).text();
  const found = text.match(/^appliance_requests_total\{model="wordy",outcome="cancelled"\} (\d+)/m);
  return Number(found?.[1] ?? 0);
}

// What hangs up on one request of the model `wordy` ends it.
async function cancels(hangUp) {
  const before = await cancelled();
  await hangUp();
  while ((await cancelled()) !== before + 1) await new Promise((next) => setTimeout(next, 20));
}

test("openai", async (t) => {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const chats = client.chat.completions;

  await t.test("chat and stream", async () => {
    const whole = await chats.create({ model: "small", messages });
    let said = "";
    const options = { stream: true, stream_options: { include_usage: true } };
    let usage;
    for await (const chunk of await chats.create({ model: "small", messages, ...options })) {
      said += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(whole.choices[0].message.content, ANSWER);
    assert.equal(said, ANSWER);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  });
  await t.test("responses", async () => {
    const whole = await client.responses.create({ model: "small", input: "Hello" });
    const stream = client.responses.stream({ model: "small", input: "Hello" });
    assert.equal(whole.output_text, ANSWER);
    assert.equal((await stream.finalResponse()).output_text, ANSWER);
  });
  await t.test("parallel tools", async () => {
    const whole = await chats.create({ model: "small", messages, tools });
    const streamed = await chats.stream({ model: "small", messages, tools }).finalChatCompletion();
    for (const answer of [whole, streamed]) {
      const calls = answer.choices[0].message.tool_calls;
      assert.deepEqual(calls.map((call) => JSON.parse(call.function.arguments)), BOOKED);
    }
  });
  await t.test("structured output", async () => {
    const format = { type: "json_schema", json_schema: { name: "stay", schema, strict: true } };
    const asked = { model: "small", messages, response_format: format, max_tokens: 1000 };
    Stay.parse(JSON.parse((await chats.create(asked)).choices[0].message.content));
  });
  await t.test("embeddings", async () => {
    const answer = await client.embeddings.create({ model: "embedder", input: ["Hello", "river"] });
    assert.deepEqual(answer.data.map((vector) => vector.embedding.length), [256, 256]);
  });
  await t.test("errors", async () => {
    const unknown = chats.create({ model: "gpt-9", messages });
    await assert.rejects(unknown, OpenAI.NotFoundError);
    await assert.rejects(
      chats.create({ model: "small", messages, max_tokens: 0 }),
      OpenAI.BadRequestError,
    );
  });
  await t.test("cancel", () =>
    cancels(async () => {
      for await (const _ of await chats.create({ model: "wordy", messages, stream: true })) break;
    }),
  );
});

test("anthropic", async (t) => {
  const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
  const asked = { model: "small", max_tokens: 1500, messages };
  const textOf = (message) => message.content.find((block) => block.type === "text").text;

  await t.test("chat and stream", async () => {
    const whole = await client.messages.create(asked);
    const streamed = await client.messages.stream(asked).finalMessage();
    assert.equal(textOf(whole), ANSWER);
    assert.equal(textOf(streamed), ANSWER);
    assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
  });
  await t.test("parallel tools", async () => {
    const more = { ...asked, tools: [{ name: "book", input_schema: schema }] };
    for (const answer of [
      await client.messages.create(more),
      await client.messages.stream(more).finalMessage(),
    ]) {
      const calls = answer.content.filter((block) => block.type === "tool_use");
      assert.deepEqual(calls.map((call) => call.input), BOOKED);
    }
  });
  await t.test("structured output", async () => {
    const output_config = { format: { type: "json_schema", schema } };
    Stay.parse(JSON.parse(textOf(await client.messages.create({ ...asked, output_config }))));
  });
  await t.test("errors", async () => {
    const unknown = client.messages.create({ ...asked, model: "claude-9" });
    await assert.rejects(unknown, Anthropic.NotFoundError);
  });
  await t.test("cancel", () =>
    cancels(async () => {
      const stream = await client.messages.create({ ...asked, model: "wordy", stream: true });
      for await (const event of stream) if (event.type === "content_block_delta") break;
    }),
  );
});

test("ollama", async (t) => {
  const client = new Ollama({ host: url });

  await t.test("chat and stream", async () => {
    const whole = await client.chat({ model: "small", messages });
    let said = "";
    for await (const line of await client.chat({ model: "small", messages, stream: true }))
      said += line.message.content;
    assert.equal(whole.message.content, ANSWER);
    assert.equal(said, ANSWER);
  });
  await t.test("parallel tools", async () => {
    const answer = await client.chat({ model: "small", messages, tools });
    assert.deepEqual(answer.message.tool_calls.map((call) => call.function.arguments), BOOKED);
  });
  await t.test("structured output", async () => {
    const asked = { model: "small", messages, format: schema, options: { num_predict: 1000 } };
    Stay.parse(JSON.parse((await client.chat(asked)).message.content));
  });
  await t.test("embeddings", async () => {
    const answer = await client.embed({ model: "embedder", input: ["Hello", "river"] });
    assert.deepEqual(answer.embeddings.map((vector) => vector.length), [256, 256]);
  });
  await t.test("errors", async () => {
    await assert.rejects(client.chat({ model: "llama9", messages }), { status_code: 404 });
  });
  await t.test("list, show and pull of a served model", async () => {
    const { models } = await client.list();
    assert.ok(models.some((model) => model.name === "small:latest"));
    assert.ok((await client.show({ model: "small" })).capabilities.includes("tools"));
    assert.equal((await client.pull({ model: "small" })).status, "success");
  });
  await t.test("cancel", () =>
    cancels(async () => {
      const stream = await client.chat({ model: "wordy", messages, stream: true });
      await assert.rejects(async () => {
        for await (const _ of stream) stream.abort();
      }, { name: "AbortError" });
    }),
  );
});

const providers = {
  "AI SDK, OpenAI's dialect": createOpenAICompatible({
    name: "appliance",
    baseURL: `${url}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
  }),
  "AI SDK, Ollama's dialect": createOllama({ baseURL: `${url}/api` }),
};
for (const [name, provider] of Object.entries(providers))
  test(name, async (t) => {
    const asked = { model: provider("small"), prompt: "Hello", maxRetries: 0 };

    await t.test("chat and stream", async () => {
      const whole = await generateText(asked);
      const streamed = streamText(asked);
      assert.equal(whole.text, ANSWER);
      assert.equal(await streamed.text, ANSWER);
      assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
    });
    await t.test("parallel tools and their results", async () => {
      const booked = [];
      const execute = async (stay) => booked.push(stay) && "done";
      const book = tool({ description: "Book a stay.", inputSchema: Stay, execute });
      const answer = await generateText({ ...asked, tools: { book }, stopWhen: stepCountIs(3) });
      assert.deepEqual(booked, BOOKED);
      assert.equal(answer.text, ANSWER);
    });
    await t.test("structured output", async () => {
      const output = Output.object({ schema: Stay });
      Stay.parse((await generateText({ ...asked, output, maxOutputTokens: 1000 })).output);
    });
    await t.test("embeddings", async () => {
      const model = provider.textEmbeddingModel("embedder");
      const { embeddings } = await embedMany({ model, values: ["Hello", "river"], maxRetries: 0 });
      assert.deepEqual(embeddings.map((vector) => vector.length), [256, 256]);
    });
    await t.test("errors", async () => {
      await assert.rejects(generateText({ ...asked, model: provider("gpt-9") }), {
        statusCode: 404,
      });
    });
    await t.test("cancel", () =>
      cancels(async () => {
        const control = new AbortController();
        const abortSignal = control.signal;
        const stream = streamText({ ...asked, model: provider("wordy"), abortSignal });
        for await (const _ of stream.textStream) control.abort();
      }),
    );
  });
