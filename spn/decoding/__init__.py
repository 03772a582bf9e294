"""The decoders: one value after the other, all of a slice at once, and from the bytes of a compressed image."""
