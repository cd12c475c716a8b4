"""Which files of ``integration/`` `make test` runs."""

IN_MAKE_TEST = {
    "cli", "crash", "disk_failures", "init_cli", "llm_no_oversell", "llm_server", "llm_server_failures",
    "pay_cli", "payments", "policy_cli", "postgres_faults", "sdk_anthropic", "serve", "signed_reports", "ten_hung_calls", "testnet_chain",
    "testnet_contracts", "tokens_no_oversell", "tools_no_oversell", "two_guards_one_process",
}  # fmt: skip
"""One file of each kind, and quick: each promise is kept on a real chain, in processes, over sockets. The others are long."""


def is_in_make_test(path):
    return path.stem.removeprefix("test_") in IN_MAKE_TEST
