"""The wire schema of package peerloom.v1: generated stubs, committed; `generate.py --check` guards them."""
