"""
Ten minutes
===========

A tutorial.
"""

print(1)
