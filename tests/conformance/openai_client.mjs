// The official JavaScript client against the service. OPENAI_NODE: the folder that holds node_modules/openai.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const require = createRequire(`${process.env.OPENAI_NODE}/`);
const OpenAI = require('openai').default ?? require('openai');

const url = process.env.DFLASH2_URL ?? 'http://127.0.0.1:8000';
const apiKey = process.env.DFLASH2_API_KEY ?? 'none';
const keyed = process.env.DFLASH2_ASKS_FOR_KEYS === '1';
const model = 'dflash2-embedded';
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const chat = { model, messages: [{ role: 'user', content: 'Write a short story about a shy bird.' }], temperature: 0, max_tokens: 40 };
const schema = {
  type: 'object',
  properties: { sky: { enum: ['clear', 'cloudy'] }, warm: { type: 'boolean' } },
  required: ['sky', 'warm'],
  additionalProperties: false,
};
const tools = [{ type: 'function', function: { name: 'report_weather', parameters: schema, strict: true } }];

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const scenarios = {
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert.deepEqual(ids, [model]);
  },

  async wholeAnswer() {
    const { data, response, request_id } = await client.chat.completions.create(chat, { headers: { 'x-request-id': 'js-1' } }).withResponse();
    assert.equal(response.status, 200);
    assert.equal(request_id, 'js-1');
    assert.equal(data.object, 'chat.completion');
    assert.equal(data.choices[0].finish_reason, 'length');
    assert.equal(data.usage.completion_tokens, 40);
    assert.ok(data.metrics.speculative_decoding.acceptance_histogram.length > 1);
  },

  async stream() {
    const whole = await client.chat.completions.create(chat);
    const chunks = await collect(await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }));
    assert.equal(chunks[0].choices[0].delta.role, 'assistant');
    assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? '').join(''), whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).usage, whole.usage);
    assert.deepEqual(chunks.at(-1).choices, []);
  },

  async streamHelper() {
    const whole = await client.chat.completions.create(chat);
    let text = '';
    const runner = client.chat.completions.stream(chat).on('content', (delta) => (text += delta));
    const last = await runner.finalChatCompletion();
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(last.choices[0].message.content, text);
  },

  async abort() {
    const stream = await client.chat.completions.create({ ...chat, max_tokens: 1500, ignore_eos: true, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    stream.controller.abort();
    assert.ok((await client.chat.completions.create({ ...chat, max_tokens: 2 })).choices.length);
  },

  async completions() {
    const asked = { model, prompt: ['import os', 'Once'], temperature: 0, max_tokens: 9 };
    const whole = await client.completions.create(asked);
    const texts = ['', ''];
    for (const chunk of await collect(await client.completions.create({ ...asked, stream: true }))) {
      for (const choice of chunk.choices) texts[choice.index] += choice.text;
    }
    assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
  },

  async severalChoicesAndLogprobs() {
    const answer = await client.chat.completions.create({ ...chat, temperature: 1, seed: 3, n: 2, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices.length, 2);
    assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
  },

  async stopStrings() {
    const full = (await client.chat.completions.create(chat)).choices[0].message.content;
    const stop = full.slice(10, 14);
    const cut = await client.chat.completions.create({ ...chat, stop: [stop] });
    assert.equal(cut.choices[0].message.content, full.slice(0, full.indexOf(stop)));
  },

  async toolCalls() {
    const asked = { ...chat, max_tokens: 200, tools, tool_choice: 'required', parallel_tool_calls: false };
    const whole = await client.chat.completions.create(asked);
    const [call] = whole.choices[0].message.tool_calls;
    assert.equal(whole.choices[0].finish_reason, 'tool_calls');
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ['sky', 'warm']);
    const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  },

  async parse() {
    const response_format = { type: 'json_schema', json_schema: { name: 'weather', schema, strict: true } };
    const answer = await client.chat.completions.parse({ ...chat, max_tokens: 200, response_format });
    assert.equal(typeof answer.choices[0].message.parsed.warm, 'boolean');
  },

  async errors() {
    await assert.rejects(client.chat.completions.create({ ...chat, temperature: -1 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.deepEqual([error.status, error.type, error.param], [400, 'invalid_request_error', 'temperature']);
      return Boolean(error.requestID);
    });
    await assert.rejects(client.chat.completions.create({ ...chat, model: 'other' }), (error) => {
      assert.ok(error instanceof OpenAI.NotFoundError);
      return error.code === 'model_not_found';
    });
    await assert.rejects(client.chat.completions.create({ ...chat, max_tokens: 1e6, stream: true }), (error) => error.code === 'context_length_exceeded');
  },

  async keys() {
    if (!keyed) return;
    const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'sk-wrong', maxRetries: 0 });
    await assert.rejects(stranger.chat.completions.create(chat), (error) => {
      assert.ok(error instanceof OpenAI.AuthenticationError);
      return error.code === 'invalid_api_key';
    });
  },
};

let failed = 0;
for (const [name, scenario] of Object.entries(scenarios)) {
  try {
    await scenario();
    console.log(`  ok     ${name}`);
  } catch (error) {
    failed += 1;
    console.error(error);
    console.log(`  FAILED ${name}: ${String(error.message).split('\n')[0]}`);
  }
}
process.exit(failed ? 1 : 0);
