// Gives each answer of a corpus (standard input) to the official client, and prints what it pays with.
import { readFileSync } from "node:fs";
import { registerExactEvmScheme } from "@x402/evm/exact/client";
import { wrapFetchWithPayment, x402Client } from "@x402/fetch";
import { privateKeyToAccount } from "viem/accounts";

const [key, url] = process.argv.slice(2);
const cases = JSON.parse(readFileSync(0, "utf8"));
const signer = privateKeyToAccount(key);
const told = [];

for (const { id, status, headers, body } of cases) {
  const sent = [];
  const shop = async (input, init) => {
    const asked = new Request(input, init);
    const header = asked.headers.get("PAYMENT-SIGNATURE") ?? asked.headers.get("X-PAYMENT");
    if (header !== null) {
      sent.push(header);
      return new Response("{}", { status: 200 });
    }
    const lines = new Headers();
    for (const [name, value] of headers) lines.append(name, value);
    return new Response(Buffer.from(body, "base64"), { status, headers: lines });
  };
  const client = new x402Client();
  registerExactEvmScheme(client, { signer });
  let error = "";
  try {
    await wrapFetchWithPayment(shop, client)(url);
  } catch (problem) {
    error = String(problem?.message ?? problem).slice(0, 200);
  }
  told.push({ id, sent, error });
}
console.log(JSON.stringify(told));
