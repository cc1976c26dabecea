"""Benchmarks: programs that compare, in one run, with what a user would pick instead."""
