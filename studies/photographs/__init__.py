"""Photographs: how the stages that come with the package are trained, and how well they enlarge and denoise."""
