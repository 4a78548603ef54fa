"""What breaks hdexport: damage, kills, fuzzed requests, threads and overload. docs/reliability.md has the figures."""
