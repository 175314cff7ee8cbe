"""How long compiling a training step takes."""

# Seconds for each block of the transformer: on two CPU cores as measured; on Ascend extrapolated, with its back end.
BLOCK_SECONDS = {"CPU": (2.0, 4.0), "Ascend": (5.0, 15.0)}
# Shorter waits need no announcement.
LEAST_TOLD = 60


def expected_time(blocks: int, device: str) -> str:
    """How long compiling takes, in words; nothing for what is over soon."""
    low, high = (blocks * seconds / 60 for seconds in BLOCK_SECONDS[device])
    if high * 60 < LEAST_TOLD:
        return ""
    low, high = max(1, round(low)), max(1, round(high))
    return f"about {low} to {high} minutes" if low != high else f"about {low} minute{'s' if low > 1 else ''}"
