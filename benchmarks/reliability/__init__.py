"""Tests of damage, kills, fuzzed requests, threads and overload. docs/reliability.md has their figures."""
