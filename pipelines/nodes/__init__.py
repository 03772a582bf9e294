"""Node functions: (config section, upstream outputs) -> outputs on storage. One module each, so that each node's
fingerprint covers the code it uses and no other."""
