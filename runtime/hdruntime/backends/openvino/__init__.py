"""OpenVINO, on CPUs and on Intel's GPUs and NPUs."""
