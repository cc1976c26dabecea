"""Regions of a spec that was replaced take no more rows.

Whoever changes the spec commits it first and lists regions afterwards; those of older specs are
flushed and sealed. A region that is created meanwhile is found by one of two looks: the listing
sees it and retires it, or whoever claims it looks at the spec after the claim and sees the new one.
"""

from __future__ import annotations

import uuid

from penstock.errors import RegionSealed
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import ClaimedRegion
from penstock.memwal.manifest import RegionStatus, manifest_chain
from penstock.memwal.table_versions import read_details


def check_spec(table: BaseTable, region: ClaimedRegion) -> None:
    """Raise `RegionSealed` if the claimed region belongs to a spec that was replaced.

    Also when the region was there: whoever made it may not have come to look.
    """
    found = read_details(table.store, table.dataset().version)
    spec = found[0].current_spec if found else None
    if spec is not None and spec.spec_id > region.manifest.region_spec_id:
        if region.created:
            seal(table, region.region_id, region.manifest.writer_epoch)
        raise RegionSealed(f"region {region.region_id} belongs to a spec that was replaced")


def seal(table: BaseTable, region_id: uuid.UUID, epoch: int) -> None:
    chain = manifest_chain(table.store, region_id, table.seams)
    chain.update(
        epoch,
        lambda current: current.next(status=RegionStatus.SEALED),
        landed=lambda current: current.status is RegionStatus.SEALED,
    )
