"""Tuned configs: `table` looks them up, `search` measures them."""
