"""What x402guard costs, row by row: ``make bench`` prints the table and writes it as JSON.

Each file is one row and yields its figures. Times are taken in interleaved rounds (A B A B), because the machines are
noisy: read minima, medians and ratios of one run. Peers run in an environment of their own.
"""
