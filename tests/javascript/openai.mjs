// Asks through the proxy by OpenAI's own client, whole and as a stream; prints what came, a line of JSON each.
import OpenAI from "openai";

const client = new OpenAI();
const ask = { model: "gpt-4o", messages: [{ role: "user", content: "hi" }], max_completion_tokens: 100 };

async function told(make) {
  try {
    console.log(JSON.stringify(await make()));
  } catch (error) {
    console.log(JSON.stringify({ name: error.constructor.name, status: error.status, message: error.message }));
  }
}

await told(async () => (await client.chat.completions.create(ask)).choices[0].message.content);
await told(async () => {
  const pieces = [];
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
    pieces.push(chunk.choices[0]?.delta?.content ?? "");
  }
  return pieces;
});
await told(async () => {
  const stream = await client.chat.completions.create({ ...ask, stream: true });
  for await (const _ of stream) break; // leaves early: the connection is closed
  return "left";
});
await told(async () => (await client.chat.completions.create({ ...ask, max_completion_tokens: 16000 })).id);
