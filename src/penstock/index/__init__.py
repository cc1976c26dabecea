"""Indexes: those a MemTable keeps in memory, and those of a base table they are modelled on.

`base` reads the base table's indexes and repeats them on a generation; `ivf`, `text` and `scalar`
are their in-memory counterparts; `primary_key` and `bloom` find keys. Each in-memory index takes a
batch in two steps: `encode`, which is pure and may run anywhere, and `append`, which is quick and
runs under the MemTable's lock. This layer imports nothing of Penstock but `errors`.
"""
