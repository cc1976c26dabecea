"""The manifest of a version as it is published: with the version's own number everywhere.

Commits are prepared detached, under a version number that Lance draws at random, and published as
the next one. That number is in the manifest once as the version, and once for each run of rows
that Lance keeps the versions of: when they were created, and when they were changed last. All of
them become the number published. Who asks which rows are newer than a version would otherwise get
these rows for ever.
"""

from __future__ import annotations

import re

from penstock.memwal import wire

FIRST_DETACHED = 2**63
_SEQUENCES = ("last_updated_at_versions", "created_at_versions")
_DETACHED_RUN = re.compile(rb"\x10[\x80-\xff]{9}\x01")
"""A run's version on the wire, if it is detached: a number of 64 bits takes ten bytes."""


def as_version(manifest: bytes, version: int) -> bytes:
    """A manifest message as that of a version."""
    message = wire.new("TableManifest")
    message.ParseFromString(manifest)
    message.version = version
    for number, stored in enumerate(message.fragments):
        if _DETACHED_RUN.search(stored):
            message.fragments[number] = _settled(stored, version)
    encoded: bytes = message.SerializeToString()
    return encoded


def _settled(stored: bytes, version: int) -> bytes:
    fragment = wire.new("DataFragment")
    fragment.ParseFromString(stored)
    for name in _SEQUENCES:
        sequence = wire.new("RowVersions")
        sequence.ParseFromString(getattr(fragment, name))
        for run in sequence.runs:
            if run.version >= FIRST_DETACHED:
                run.version = version
        if sequence.runs:
            setattr(fragment, name, sequence.SerializeToString())
    encoded: bytes = fragment.SerializeToString()
    return encoded
