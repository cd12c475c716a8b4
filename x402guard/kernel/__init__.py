"""The kernel: the rows, the rules and the signer. It checks what the other rooms propose, and decides nothing itself."""
