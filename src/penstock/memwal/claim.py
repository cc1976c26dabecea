"""Claiming a region: become its writer, shut out the former one, find what it left behind.

1. Write the next manifest version with a higher epoch. The former owner can no longer change the
   manifest, but its next WAL entry would still land.
2. Put a fence at the tip of the WAL. The former owner's next entry collides with it.
3. Replay what lies between the replay position and the fence. Nothing can be added there now.

Doing 3 before 2 would lose an entry that the former owner acknowledged in between. A region that
this claim itself created has no former owner, and needs no fence.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import Fenced, RegionSealed, StorageError
from penstock.memwal.manifest import RegionManifest, RegionStatus, manifest_chain
from penstock.memwal.wal import FIRST_POSITION, Wal, WalEntry
from penstock.storage.epoch import VersionedObject
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams


@dataclass(frozen=True, slots=True)
class RegionIdentity:
    """Which region: its id, the spec it belongs to, and its values under that spec."""

    region_id: uuid.UUID
    spec_id: int = 0
    values: Sequence[tuple[str, bytes]] = ()


@dataclass(frozen=True, slots=True)
class ClaimedRegion:
    region_id: uuid.UUID
    manifest: RegionManifest
    chain: VersionedObject[RegionManifest]
    wal: Wal
    created: bool
    next_position: int
    verified_ms: float

    def replay(self) -> Iterator[WalEntry]:
        """The entries that are in no generation yet, oldest first."""
        covered = self.manifest.replay_after_wal_entry_position
        return self.wal.replay(covered, self.next_position - 1)


def claim_region(store: ObjectStore, identity: RegionIdentity, seams: Seams) -> ClaimedRegion:
    """Become the writer of a region, creating it if it does not exist."""
    chain = manifest_chain(store, identity.region_id, seams)
    wal = Wal(store, identity.region_id, seams)
    verified_ms = seams.clock.monotonic_ms()

    def first() -> RegionManifest:
        return RegionManifest(
            region_id=identity.region_id,
            writer_epoch=1,
            region_spec_id=identity.spec_id,
            region_values=tuple(identity.values),
        )

    def next_owner(current: RegionManifest) -> RegionManifest:
        if current.status is RegionStatus.SEALED:
            raise RegionSealed(
                f"region {identity.region_id} of {store.uri} is sealed: its rows now belong to "
                "regions of a newer spec; open the table again"
            )
        return current.next(writer_epoch=current.writer_epoch + 1)

    manifest, created = chain.claim(first, next_owner)
    covered = manifest.replay_after_wal_entry_position
    if created and not wal.exists(FIRST_POSITION):
        next_position = FIRST_POSITION
    else:
        tip = wal.tip(max(covered, manifest.wal_entry_position_last_seen))
        next_position = wal.fence(tip, manifest.writer_epoch, covered) + 1
    return ClaimedRegion(
        region_id=identity.region_id,
        manifest=manifest,
        chain=chain,
        wal=wal,
        created=created,
        next_position=next_position,
        verified_ms=verified_ms,
    )


def standing_manifest(
    chain: VersionedObject[RegionManifest], known: RegionManifest, seams: Seams
) -> RegionManifest:
    """The newest manifest of a region that is ours; raises `Fenced` if it is not any more."""
    failure: StorageError | None = None
    for _ in seams.attempts():
        try:
            if chain.is_latest(known.version):
                return known
            latest = chain.latest()
            if latest is None:
                raise Fenced(f"region {known.region_id} is gone; was the table dropped?")
            chain.check(latest, known.writer_epoch)
            return latest
        except StorageError as error:
            failure = error
    raise StorageError(f"region {known.region_id}: the claim cannot be verified: {failure}")
