"""Where bytes that are Penstock's own live, and the seams for time and chance.

`objects` is the contract; `local` and `remote` keep it, `faults` breaks it on purpose; `open`
chooses by URI; `probe` refuses stores that would not keep it; `lease` and `retry` build on it.
"""
