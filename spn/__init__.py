"""Subscale Pixel Networks and multidimensional upscaling (Menick & Kalchbrenner, ICLR 2019) in plain torch."""
