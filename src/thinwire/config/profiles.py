"""Named link profiles. Delays are one-way; an unset rate is no limit."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LinkProfile:
    """The line under each link of a worker."""

    name: str
    up_mbps: float | None = None
    down_mbps: float | None = None
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    latency_occupies: bool = False
    """Whether the delay of each frame also holds the line (the rule of one public benchmark, not of a network)."""


OPEN = LinkProfile("open")
PROFILES = {
    profile.name: profile
    for profile in (
        OPEN,
        LinkProfile("lan_1g", 1000, 1000, 0.1),
        LinkProfile("fibre_200mbps_50ms", 200, 200, 50),
        LinkProfile("home_80mbps", 80, 80, 20),
        LinkProfile("dsl_2mbps", 2, 2, 20),
        LinkProfile("satellite", 20, 20, 300),
        LinkProfile("protocol_nanogpt", 200, 200, 50, latency_occupies=True),
    )
}
NUMBER = r"(\d+(?:\.\d+)?)"
CUSTOM = re.compile(rf"(?:up{NUMBER}_down)?{NUMBER}mbps(?:_{NUMBER}ms)?(?:_jitter{NUMBER}ms)?")


def find_profile(name: str) -> LinkProfile:
    """Return a named profile, or read one such as `20mbps_30ms` or `up5_down50mbps_20ms_jitter3ms`."""
    if name in PROFILES:
        return PROFILES[name]
    match = CUSTOM.fullmatch(name)
    if match:
        up, down, delay, jitter = match.groups()
        profile = LinkProfile(name, float(up or down), float(down), float(delay or 0), float(jitter or 0))
        if not profile.up_mbps or not profile.down_mbps:
            raise ValueError(f"link profile {name!r} has a rate of 0, which carries nothing; choose a rate above 0")
        return profile
    near = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(
        f"unknown link profile {name!r}: {hint}known are {', '.join(PROFILES)}, or write your own like 20mbps_30ms or up5_down50mbps_20ms"
    )
