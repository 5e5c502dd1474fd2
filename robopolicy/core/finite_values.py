"""Find NaN and infinity in data: affected columns, elements and episodes by name."""

from collections.abc import Collection

import torch
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import DataError
from robopolicy.core.former_names import keep_former_names
from robopolicy.core.spec import Field


def element_names(field: Field, prefix: str = "") -> tuple[str, ...]:
    """Return a name for each element of a vector field; its index if the field has no names."""
    return field.names or tuple(f"{prefix}[{index}]" for index in range(field.size))


def join_names(items: list[str], limit: int = 4) -> str:
    """Join names, at most `limit` of them."""
    rest_text = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + rest_text


def nonfinite_columns(episodes: Episodes, keys: Collection[str] | None = None, rewards: bool = True) -> list[str]:
    """Describe each column that contains NaN or infinity: rows, elements and episodes.

    keys: observation keys to check, None for all; actions are always checked. Final frames that the data lacks do not
    count as rows.
    """
    observation = {key: value for key, value in episodes.observation.items() if keys is None or key in keys}
    terms = {f"reward '{name}'": values for name, values in (episodes.rewards or {}).items()} if rewards else {}
    texts: list[str] = []
    for name, values in {"action": episodes.actions, **observation, **terms}.items():
        if not values.is_floating_point() or bool(values.isfinite().all()):
            continue
        values, owner = _recorded(episodes, values) if name in observation else (values, episodes.episode_of_step)
        bad_mask = ~values.isfinite().reshape(len(values), -1).cpu()
        rows = bad_mask.any(1).nonzero().squeeze(1)
        field = episodes.action_field if name == "action" else episodes.observation_fields.get(name)
        names = element_names(field, name) if field is not None else ("value",) * bad_mask.shape[1]
        elements = [name for name, is_bad in zip(names, bad_mask.any(0), strict=True) if is_bad]
        episode_names = [str(episode) for episode in sorted({int(episode) for episode in owner.cpu()[rows]})]
        texts.append(
            f"{name}: {len(rows)} of {len(values)} rows contain NaN or infinity ({join_names(elements)}; episodes "
            f"{join_names(episode_names)})"
        )
    return texts


def require_finite_columns(episodes: Episodes, keys: Collection[str] | None = None, rewards: bool = False) -> None:
    """Raise DataError, naming columns, elements and episodes, if training data contains NaN or infinity."""
    texts = nonfinite_columns(episodes, keys, rewards)
    if texts:
        raise DataError(
            f"The data cannot be used for training. {'; '.join(texts)}. Exclude or repair these episodes; "
            "'robopolicy doctor' checks a whole dataset."
        )


def _recorded(episodes: Episodes, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Return the recorded frames [N, ...] and the episode [N] of each."""
    lengths = episodes.lengths.cpu()
    owner = torch.repeat_interleave(torch.arange(len(episodes)), lengths + 1)
    recorded_mask = torch.ones(len(owner), dtype=torch.bool)
    if episodes.final_known is not None:
        ends = episodes.frame_starts.cpu() + lengths
        recorded_mask[ends[~episodes.final_known.cpu()]] = False
    return frames.cpu()[recorded_mask], owner[recorded_mask]


keep_former_names(__name__, {"listed": "join_names"})
