"""Whether a release of Megatron has the options that the table says it has."""

from megatron_lossagg.megatron_options import OPTIONS

NOT_OF_A_CONFIG_CLASS = {"flextron"}
"""Set on the config by Megatron-LM's elastification."""


def missing_or_early(fields, release):
    """Return the options of a model's config that ``release`` has otherwise than the table says.

    ``fields``: of its config classes. ``release``: ``0.13`` to ``0.19``, ``main`` or ``dev``.
    """
    return {
        name
        for option in OPTIONS
        if option.holder == "model config"
        for name in set(option.names) - NOT_OF_A_CONFIG_CLASS
        if (name in fields) != is_in(option, name, release)
    }


def is_in(option, name, release):
    """Return whether a release has an option, as the table says."""
    since = option.later.get(name, option.since)
    if since == "dev" or release in option.lacks:
        return since == release
    return since != "0.20" and (release in ("main", "dev") or since <= release)
