"""A benchmark's page and charts."""
