"""`hdexport bench`: latency, memory and error of bundles and baselines across sequence lengths."""
