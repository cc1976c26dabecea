"""Spark sessions: one in this process that suits tables, and what any other needs.

`local_session` starts Spark inside the process (a Java of its own, quiet, no ports open to others,
no web page unless asked for). Everything it sets can be overridden with `conf`. The heap and the
options of Java count only for the first session of a process, because there is one Java per
process; the rest counts for every session.

Workers would import PySpark from a zip, which is compiled anew in every process. Spark takes the
installed package instead if SPARK_HOME names a directory without `python/`; such a one is made
once, in the user's cache directory, unless SPARK_HOME is set already.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyspark
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.errors import PenstockError

JAVA_MINIMUM = 17
JAVA_PACKAGE = "openjdk-17-jre-headless"
_NEEDED = {
    "spark.sql.timeType.enabled": "true",  # without it a table with times cannot be counted
}
"""What tables want of a session, and Spark has switched off."""
_SHIM_PARTS = ("bin", "jars", "sbin")


def local_session(
    app_name: str = "penstock",
    *,
    master: str = "local[2]",
    memory: str = "2g",
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """A Spark session in this process, or the one that is there already.

    `memory` is the heap of Java; in local mode, everything that Spark holds is in it. `conf` are
    further settings of Spark, which win over those made here.
    """
    if SparkContext._gateway is None:
        check_java()
        _prepare_environment()
    log4j = Path(__file__).with_name("log4j2.properties")
    settings = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": f'"-Dlog4j2.configurationFile={log4j.as_uri()}"',
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.shuffle.partitions": str(_slots(master)),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
        **_NEEDED,
        **(conf or {}),
    }
    builder = SparkSession.Builder().appName(app_name).master(master).config(map=dict(settings))
    with warnings.catch_warnings():
        # Java is started by fork and exec; what Lance fears is a fork that goes on.
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        return register(builder.getOrCreate())


def register(spark: SparkSession) -> SparkSession:
    """Make a session ready for `format("penstock")`."""
    from penstock.spark.source import PenstockSource

    for name, value in _NEEDED.items():
        with suppress(PySparkException):  # who may not set it has a session that does without
            spark.conf.set(name, value)
    spark.dataSource.register(PenstockSource)
    return spark


def check_java() -> None:
    """Refuse to start without a Java that Spark can use, and say how to get one."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    remedy = (
        f"install Java {JAVA_MINIMUM} (on Debian or Ubuntu, as root: apt-get install "
        f"{JAVA_PACKAGE}), or point JAVA_HOME to one. Only Spark needs it"
    )
    if java is None:
        raise PenstockError(f"Spark needs Java, and there is none; {remedy}")
    try:
        told = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PenstockError(
            f"Spark needs Java, and {java} does not run ({error}); {remedy}"
        ) from error
    found = re.search(r' version "(\d+)', told.stderr + told.stdout)
    if found is None or int(found[1]) < JAVA_MINIMUM:
        version = f"Java {found[1]}" if found else "no Java that says its version"
        raise PenstockError(
            f"Spark needs Java {JAVA_MINIMUM} or newer, and {java} is {version}; {remedy}"
        )


def _slots(master: str) -> int:
    """How many tasks run at a time on a local master."""
    if found := re.fullmatch(r"local\[(\d+)(?:,\d+)?\]", master):
        return int(found[1])
    if found := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master.replace(" ", "")):
        return int(found[1]) * int(found[2])
    return 1 if master == "local" else os.cpu_count() or 1


def _prepare_environment() -> None:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if not os.environ.get("SPARK_HOME"):
        os.environ.pop("SPARK_HOME", None)  # an empty one breaks Spark's start
        shim = _spark_home()
        if shim is not None:
            os.environ["SPARK_HOME"] = shim


def _spark_home() -> str | None:
    """A directory with PySpark's programs and jars, without its zipped Python; None if not."""
    installed = Path(pyspark.__file__).resolve().parent
    name = hashlib.sha256(f"{installed}:{pyspark.__version__}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "penstock")
    home = cache / f"spark-home-{name}"
    if (home / "jars").is_dir():
        return str(home)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".spark-home-", dir=cache))
        for part in _SHIM_PARTS:
            (made / part).symlink_to(installed / part, target_is_directory=True)
        with suppress(OSError):  # somebody else made it in the same moment
            made.rename(home)
            return str(home)
        shutil.rmtree(made, ignore_errors=True)
    except OSError:
        return None
    return str(home) if (home / "jars").is_dir() else None
