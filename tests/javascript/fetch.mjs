// Buys a page through the proxy with nothing but fetch, then reads one that is refused.
const [proxy, token, page, dear] = process.argv.slice(2);

for (const url of [page, dear]) {
  const answer = await fetch(`${proxy}${url}`, { headers: { "X402guard-Session": token } });
  const receipt = answer.headers.get("x402guard-receipt");
  console.log(JSON.stringify({ status: answer.status, body: await answer.json(), receipt: receipt && JSON.parse(receipt) }));
}
