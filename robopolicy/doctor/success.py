"""Can success be seen at all, and did the demonstrations succeed? Without either, 0 % means nothing."""

from robopolicy.core.episodes import Episodes
from robopolicy.core.spec import WorldSpec
from robopolicy.doctor.findings import Finding, Health


def check_success(episodes: Episodes, spec: WorldSpec | None) -> list[Finding]:
    """Return whether the world, where it is known, says which episodes succeed, and how many recorded ones did."""
    if spec is not None and not spec.reports_success:
        text = f"'{spec.name}' never says which episodes succeed: every rate of success is 0"
        remedy = (
            "Say it: world.options.success=package.module:function, \"world.options.success='return >= NUMBER'\", "
            "world.options.success=terminated, or world.options.success_key=NAME."
        )
        return [Finding("success", Health.BAD, text, remedy)]
    if episodes.success is None:
        text = "the dataset does not say which episodes succeeded"
        return [Finding("success", Health.UNKNOWN, text, "Success-weighted losses and world models need it.")]
    won = float(episodes.success.float().mean())
    text = f"{won:.0%} of {len(episodes)} recorded episodes succeeded"
    if won == 0:
        return [
            Finding(
                "success", Health.WARNING, text, "A policy imitates what it is shown: record episodes that succeed."
            )
        ]
    return [Finding("success", Health.GOOD, text)]
