"""What OpenVINO runs."""
