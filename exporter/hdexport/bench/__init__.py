"""`hdexport bench`: latency, memory and error of bundles and their peers across lengths, each case in a process."""
