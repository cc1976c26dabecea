"""One Spark session for all tests of a process, small and quick to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java compiles less well and starts sooner, which is what tests want."""


def quick_conf() -> dict[str, str]:
    """Settings for sessions of tests: `local_session(conf=quick_conf())`."""
    from pathlib import Path

    import penstock.spark.session as session

    log4j = Path(session.__file__).with_name("log4j2.properties").as_uri()
    return {
        "spark.driver.extraJavaOptions": f'{QUICK_START} "-Dlog4j2.configurationFile={log4j}"',
        "spark.sql.adaptive.enabled": "false",
    }


@pytest.fixture(scope="session")
def java() -> None:
    """Skips where there is no Java: Penstock works without, but Spark does not."""
    from penstock.spark.session import check_java

    try:
        check_java()
    except PenstockError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(java: None) -> Iterator[SparkSession]:
    """A session on two cores, with the data source registered."""
    from penstock.spark import local_session

    session = local_session("tests", memory="1g", conf=quick_conf())
    yield session
    session.stop()
