"""Node functions: (config, upstream outputs) -> outputs on storage."""
