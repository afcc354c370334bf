"""What `specstream tune` found out about a bundle on this device: call costs, tokens per call, and the choice made from them.

Frozen dataclasses with an exact JSON round trip. A profile belongs to a device, so it is kept in the user's cache folder and not in
the bundle: a bundle that is copied elsewhere, or lies on a disk that cannot be written to, stays as it was made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from specstream.models.errors import UserError
from specstream.models.folders import cache_folder
from specstream.runtimes.adaptive import CallCosts
from specstream.runtimes.joined import JoinWeights
from specstream.runtimes.manifest import Manifest, decode

PROFILE_SCHEMA: Final = 1

DraftName = Literal["none", "streams", "lookup", "joined"]


@dataclass(frozen=True)
class MeasuredCall:
    """The median time of one kind of call. ``stream_rows`` carried streams; 1 for a pass of delayed streams, whose ``rows`` are 0."""

    threads: int
    context: int
    rows: int
    stream_rows: int
    ms: float


@dataclass(frozen=True)
class Speed:
    """What a drafter gives at a budget, worked out from recorded texts and call costs."""

    draft: DraftName
    budget: int
    stream_rows: int
    tokens_per_call: float
    tokens_per_second: float


@dataclass(frozen=True)
class DeviceProfile:
    """What a device should run a bundle with, and the measurements behind it.

    Attributes:
        bundle: of which bundle, see :func:`bundle_id`.
        model: its name, for people.
        scheme: its quantization, for people.
        cores: usable ones when it was made.
        threads: to run with.
        draft: to draft with.
        budget: rows of a call at most.
        stream_rows: of them, how many carry streams; 1 with delayed streams, 0 without streams.
        placement: of the streams; None without.
        costs: of calls with these threads, for the adaptive budget.
        weights: that join draft sources, fitted to the sample texts; None: the usual ones.
        tokens_per_second: expected of this choice.
        plain_tokens_per_second: of plain decoding with the same threads.
        prompts: sample prompts that were decoded.
        call_cost: all that was measured.
        speeds: all that was compared.
        versions: of what made it.
    """

    bundle: str
    model: str
    scheme: str
    cores: int
    threads: int
    draft: DraftName
    budget: int
    stream_rows: int
    placement: str | None
    costs: CallCosts
    weights: JoinWeights | None
    tokens_per_second: float
    plain_tokens_per_second: float
    prompts: int
    call_cost: tuple[MeasuredCall, ...]
    speeds: tuple[Speed, ...]
    versions: dict[str, str]
    schema: int = PROFILE_SCHEMA

    def __post_init__(self) -> None:
        problems = [f"{name} is {getattr(self, name)}" for name in ("cores", "threads", "budget", "prompts") if getattr(self, name) < 1]
        if self.stream_rows < 0:
            problems.append(f"stream_rows is {self.stream_rows}")
        times = [self.tokens_per_second, self.plain_tokens_per_second, *(call.ms for call in self.call_cost)]
        times += [speed.tokens_per_second for speed in self.speeds]
        if not all(0 < time < math.inf for time in times):
            problems.append("a time or speed is not a positive number")
        if problems:
            raise UserError(f"device profile: {'; '.join(problems)}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: Path | str = "profile") -> DeviceProfile:
        """Read what :meth:`to_json` wrote.

        Raises:
            UserError: not JSON, another schema, or other keys, types and numbers than a profile has (all problems at once).
        """
        again = "run 'specstream tune' again, or remove the file"
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{source}: not JSON ({error}); {again}") from None
        if not isinstance(data, dict) or data.get("schema") != PROFILE_SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else None
            raise UserError(f"{source}: not a device profile of schema {PROFILE_SCHEMA} (found {found!r}); {again}")
        problems: list[str] = []
        try:
            profile = decode(cls, data, "", problems)
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise UserError(f"{source}: {'; '.join(problems)}; {again}")
        assert isinstance(profile, cls)
        return profile


def bundle_id(manifest: Manifest) -> str:
    """sha256 over the bundle's files: the same for a copy, another for anything that would run differently."""
    lines = sorted(f"{entry.path} {entry.sha256}\n" for entry in manifest.files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def profile_path(manifest: Manifest, cores: int) -> Path:
    """Where the profile of a bundle is kept on this device, for as many usable cores."""
    return cache_folder() / "profiles" / f"{bundle_id(manifest)[:16]}-{platform.machine() or 'cpu'}-{cores}.json"


def load_profile(manifest: Manifest, cores: int) -> DeviceProfile | None:
    """The profile of a bundle on this device, or None when it was not tuned here.

    Raises:
        UserError: there is one, and it cannot be read, makes no sense, or is of another bundle.
    """
    path = profile_path(manifest, cores)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: {reason}; run 'specstream tune' again, or remove the file") from error
    profile = DeviceProfile.from_json(text, path)
    if profile.bundle != bundle_id(manifest):
        raise UserError(f"{path}: a profile of another bundle; run 'specstream tune' again, or remove the file")
    return profile


def save_profile(profile: DeviceProfile, manifest: Manifest) -> Path:
    """Write a profile where :func:`load_profile` looks, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path = profile_path(manifest, profile.cores)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(profile.to_json(), encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot write the profile ({error.strerror}); set SPECSTREAM_CACHE to another folder") from error
    return path
