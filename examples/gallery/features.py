"""
Features
========

Text.
"""

print(1)
