"""Photographs: training the weights that come with the package, and measuring how well they enlarge and denoise."""
