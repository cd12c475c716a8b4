// Compiles the contracts of this folder into x402guard/testing/artifacts. Run it with `npm run compile`.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import solc from "solc";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "x402guard", "testing", "artifacts");

const contracts = ["DollarToken", "Permit2Like", "ExactPermit2Proxy", "UptoPermit2Proxy"];
const shared = ["Ecdsa", "IPermit2Like", "Permit2Proxy"];

const settings = {
  optimizer: { enabled: true, runs: 200 },
  viaIR: true,
  evmVersion: "cancun",
  // Neither comments nor paths may change the code, so that every machine makes the same bytes.
  metadata: { bytecodeHash: "none", appendCBOR: false },
};

const sources = Object.fromEntries(
  [...contracts, ...shared].sort().map((name) => {
    const file = `${name}.sol`;
    return [file, { content: readFileSync(join(here, file), "utf8") }];
  }),
);

function imported(file, found = new Set()) {
  if (found.has(file)) return found;
  found.add(file);
  for (const [, next] of sources[file].content.matchAll(/from "\.\/([A-Za-z0-9]+\.sol)"/g)) {
    imported(next, found);
  }
  return found;
}

function sourceSha256(file) {
  const hash = createHash("sha256");
  for (const name of [...imported(file)].sort()) {
    hash.update(`${name}\n${sources[name].content}`);
  }
  return hash.digest("hex");
}

const output = JSON.parse(
  solc.compile(
    JSON.stringify({
      language: "Solidity",
      sources,
      settings: {
        ...settings,
        outputSelection: { "*": { "*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"] } },
      },
    }),
  ),
);

const complaints = output.errors ?? [];
if (complaints.length > 0) {
  console.error(complaints.map((each) => each.formattedMessage).join("\n"));
  process.exit(1);
}

mkdirSync(target, { recursive: true });
for (const name of contracts) {
  const { abi, evm } = output.contracts[`${name}.sol`][name];
  const artifact = {
    contractName: name,
    compiler: solc.version(),
    settings,
    sourceSha256: sourceSha256(`${name}.sol`),
    abi,
    bytecode: `0x${evm.bytecode.object}`,
    deployedBytecode: `0x${evm.deployedBytecode.object}`,
  };
  writeFileSync(join(target, `${name}.json`), `${JSON.stringify(artifact, null, 2)}\n`);
  console.log(`${name}: ${evm.deployedBytecode.object.length / 2} bytes`);
}
