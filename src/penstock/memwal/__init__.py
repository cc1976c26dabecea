"""MemWAL: the LSM tree in front of a Lance table, from the WAL to generations."""
