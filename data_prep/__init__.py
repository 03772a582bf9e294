"""Raw images to sharded Parquet at each resolution and bit depth."""
