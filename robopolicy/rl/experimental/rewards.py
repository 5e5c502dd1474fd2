"""Experimental rewards for milestones, speed, smoothness, information and progress, and weights of the loss by duration
and by chunk.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from robopolicy.core.arrays import integers
from robopolicy.core.errors import ConfigError
from robopolicy.core.randomness import derive_keys, derive_seed, uniforms
from robopolicy.core.registry import is_dotted, load_dotted
from robopolicy.core.rollouts import Rollouts
from robopolicy.core.segments import distinct
from robopolicy.nn.normalizer import CONSTANT_SCALE, with_constants_kept
from robopolicy.rl.advantages.step import final_state
from robopolicy.rl.context import Context
from robopolicy.rl.registry import Need, Slot, mechanism, unknown_option
from robopolicy.rl.rewards import at_last_step, last_chunk, paid_at_end, success_only


@mechanism(Slot.REWARD, "partial_credit", source="MLE-RL (partial credit), arXiv:2509.01684")
def partial_credit(
    rollouts: Rollouts,
    context: Context,
    *,
    milestones: tuple[float, ...] = (1.0, 2.0, 4.0),
    credit: float = 0.5,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Reward failed episodes for the milestones they reached, at most `credit` in total; a success gets 1.

    Milestones are thresholds on the cumulative world reward, without success, since an episode's start. Each pays an
    equal part of `credit`, once, at the control step that reaches it, and success pays the remainder up to 1. In the
    paper, instrumented program code prints the milestones; for a robot they are those of the task's progress. Of the
    other rewards only `keep` stays.
    """
    dense_rewards = [value for name, value in rollouts.rewards.items() if name not in ("success", *keep)]
    gains = (
        torch.where(rollouts.valid, torch.stack(dense_rewards).sum(0), 0.0)
        if dense_rewards
        else torch.zeros(rollouts.valid.shape)
    )
    levels = torch.tensor(milestones, device=rollouts.valid.device)
    milestones_reached = torch.zeros_like(rollouts.group)
    sum_before, has_succeeded = torch.zeros_like(gains[:, 0, 0]), torch.zeros_like(rollouts.success[:, 0])
    columns: list[torch.Tensor] = []
    for column in range(rollouts.shape[1]):
        total = sum_before[:, None] + gains[:, column].cumsum(-1)
        milestones_passed = (total[..., None] >= levels).sum(-1)
        # A milestone stays passed where the sum falls again: it is paid once.
        milestones_passed = torch.maximum(milestones_passed.cummax(-1).values, milestones_reached[:, None])
        new_milestones = torch.cat([milestones_reached[:, None], milestones_passed], 1).diff(dim=1)
        pay = torch.where(
            rollouts.valid[:, column] & ~has_succeeded[:, None], new_milestones * (credit / len(milestones)), 0.0
        )
        first = rollouts.success[:, column] & ~has_succeeded & rollouts.alive[:, column]
        remainder = torch.where(first, 1 - credit * milestones_passed[:, -1] / len(milestones), 0.0)
        last = (rollouts.duration[:, column] - 1).clamp(min=0)
        columns.append(pay.scatter_add(-1, last[:, None], remainder[:, None]))
        is_over = rollouts.ended[:, column]
        has_succeeded = (has_succeeded | first) & ~is_over
        milestones_reached, sum_before = (
            torch.where(is_over, 0, milestones_passed[:, -1]),
            torch.where(is_over, 0.0, total[:, -1]),
        )
    rewards = torch.stack(columns, 1)
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={"success": rewards, **other_rewards})


@mechanism(Slot.REWARD, "hurry", source="length shaping, cf. PALU and DRPO")
def hurry(rollouts: Rollouts, context: Context, *, cost: float = 0.01) -> Rollouts:
    """Penalise successful episodes by `cost` per control step; a slow success stays better than a failure."""
    charged = (rollouts.success.any(1) if rollouts.whole else torch.ones_like(rollouts.group, dtype=torch.bool))[
        :, None
    ]
    time = torch.where(rollouts.valid & charged[..., None], -cost, 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "time": time})


@mechanism(Slot.REWARD, "overlong", source="DAPO, arXiv:2503.14476", needs=(Need.EPISODES,))
def overlong(rollouts: Rollouts, context: Context, *, limit: int = 0, margin: int = 0) -> Rollouts:
    """Soft punishment of long episodes: 0 up to limit - margin control steps, then linearly to -1 at the limit.

    Added at an episode's end, of any outcome. In the paper an answer is cut off beyond its margin of 4,096 of 20,480
    tokens; a robot's limit is the world's horizon, or less. Raises ConfigError unless 0 < margin < limit.
    """
    if not 0 < margin < limit:
        raise ConfigError(
            f"options.overlong.limit={limit} and margin={margin} are control steps: set a limit, such as the world's "
            "horizon, and a margin below it."
        )
    length = rollouts.duration.sum(1)
    amount = -((length - (limit - margin)) / margin).clamp(0, 1)
    return replace(rollouts, rewards={**rollouts.rewards, "overlong": paid_at_end(rollouts, amount)})


@mechanism(Slot.REWARD, "smooth", source="action-rate penalty of robot learning")
def smooth(rollouts: Rollouts, context: Context, *, cost: float = 0.1) -> Rollouts:
    """Penalise the squared change of the action between control steps of a chunk by `cost`."""
    change = (rollouts.actions[:, :, 1:] - rollouts.actions[:, :, :-1]).square().mean(-1)
    change = torch.cat([change.new_zeros((*change.shape[:2], 1)), change], 2)  # nothing comes before the first step
    charged = torch.where(rollouts.valid, -cost * change, 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "smooth": charged})


@mechanism(Slot.REWARD, "pav", source="PAV, arXiv:2410.08146", needs=(Need.VALUES,))
def progress_under_prover(rollouts: Rollouts, context: Context, *, alpha: float = 0.5, tries: int = 4) -> Rollouts:
    """Add alpha times the advantage of each chunk under a prover: the best of `tries` attempts of the policy.

    With success probabilities Q and V of the model q_ensemble (target=monte_carlo), the prover's are 1 - (1 - Q)^tries.
    It is for advantages of single chunks (gae, step_groups), which count what is paid later, too; those of whole
    episodes see the sum alone. The paper adds a step's own term to its Q.
    """

    def prover(value: torch.Tensor) -> torch.Tensor:
        return 1 - (1 - value.clamp(0, 1)) ** tries

    gain = torch.where(rollouts.alive, prover(rollouts.extras["q"]) - prover(rollouts.extras["v"]), 0.0)
    return replace(rollouts, rewards={**rollouts.rewards, "prover": at_last_step(rollouts, alpha * gain)})


@mechanism(Slot.REWARD, "information_gain", source="IGPO, arXiv:2510.14967", needs=(Need.VALUES,))
def information_gain(rollouts: Rollouts, context: Context, *, keep: tuple[str, ...] = ("uncertainty",)) -> Rollouts:
    """Pay every chunk V(s') - V(s), what it adds to the chance of success, and the last one of an episode the outcome.

    V: extras["v"] of the model q_ensemble (target=monte_carlo held_out=true: a V that has learned from these outcomes
    would already know them), within [0, 1]. The paper's is the probability of the right answer given what was seen so
    far. Rewards of chunks are used by advantage=step_groups. Of the other rewards only `keep` stays.
    """
    values = rollouts.extras["v"].clamp(0, 1)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    goes_on = rollouts.alive & ~rollouts.ended
    goes_on[:, -1] = False
    gain = at_last_step(rollouts, torch.where(goes_on, following - values, 0.0))
    outcome = success_only(rollouts, context, keep=keep)
    return replace(outcome, rewards={"information": gain, **outcome.rewards})


@mechanism(Slot.REWARD, "flawed", source="FAPO, arXiv:2510.22543", needs=(Need.EPISODES,))
def flawed(
    rollouts: Rollouts,
    context: Context,
    *,
    flaw: str = "jerk",
    most: float = 1.0,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Reward an episode 1 for a success, 0 for a success with a flaw and -1 for a failure.

    So flawed successes are learned while most episodes fail, and unlearned once most succeed. flaw: jerk, an action
    that changes by more than `most` from one control step to the next, or the import path of a function (rollouts) ->
    [B] bool. The paper's judge of flaws is a language model. Of the other rewards only `keep` stays.
    """
    if flaw == "jerk":
        actions, valid = rollouts.actions.flatten(1, 2), rollouts.valid.flatten(1)
        change = actions.diff(dim=1).abs().amax(-1)
        has_flaw = (torch.where(valid[:, 1:] & valid[:, :-1], change, 0.0) > most).any(1)
    elif is_dotted(flaw):
        has_flaw = load_dotted(flaw, "Flaw")(rollouts)
    else:
        raise unknown_option("flawed.flaw", flaw, ("jerk", "package.module:name"))
    outcome = torch.where(rollouts.row_success, torch.where(has_flaw, 0.0, 1.0), -1.0)
    reward = paid_at_end(rollouts, outcome)
    return replace(
        rollouts,
        rewards={"success": reward, **{name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}},
    )


@mechanism(
    Slot.REWARD, "noisy_labels", source="OLR (noisy labels), arXiv:2604.03993", needs=(Need.EPISODES, Need.STARTS)
)
def noisy_labels(rollouts: Rollouts, context: Context, *, rate: float = 0.2) -> Rollouts:
    """Invert the outcome of all episodes of a share `rate` of the initial states, as if their success detector erred.

    To test what is to bear with such detectors: name it before the reward that pays success. Which ones err depends on
    the number of the initial state alone.
    """
    starts = np.array(integers(rollouts.extras["start"][:, 0]))
    keys = derive_keys(derive_seed(0, "noisy labels"), starts)
    errs = torch.as_tensor(uniforms(keys, 1)[:, 0] < rate, device=rollouts.group.device)
    return replace(rollouts, success=last_chunk(rollouts) & (rollouts.row_success ^ errs)[:, None])


def rises_to_majority(shares: Sequence[float], answers: Sequence[object], slope: float) -> bool:
    """Whether a majority, of these shares at successive visits, replaces a label: it rises by at least `slope` per
    visit, and the newest answer is the only most frequent one of the visits before. An answer is None after a tie.
    """
    past = Counter(answer for answer in answers[:-1] if answer is not None).most_common(2)
    is_only = len(past) == 1 or (len(past) == 2 and past[0][1] > past[1][1])
    if not is_only or past[0][0] != answers[-1]:
        return False
    return float(np.polyfit(np.arange(len(shares)), shares, 1)[0]) >= slope - 1e-9


def _ends(rollouts: Rollouts, elements: Mapping[str, Sequence[int]]) -> Tensor:
    """Return these elements of the newest observation after each row's last chunk, [B, D]; raises ConfigError."""
    row, last = torch.arange(len(rollouts.group), device=rollouts.group.device), rollouts.alive.sum(1) - 1
    fields = {
        key: value[row, last, -1] for key, value in rollouts.next_observation.items() if isinstance(value, Tensor)
    }
    parts: list[Tensor] = []
    for key, indices in elements.items():
        if key not in fields or not indices or max(indices) >= fields[key].shape[-1] or min(indices) < 0:
            sizes = [f"{name} {value.shape[-1]}" for name, value in fields.items()]
            raise ConfigError(
                f"options.majority_label.elements: {key} has no elements {list(indices)}. Sizes: {', '.join(sizes)}."
            )
        parts.append(fields[key][:, list(indices)])
    return torch.cat(parts, -1)


@mechanism(Slot.REWARD, "majority_label", source="OLR, arXiv:2604.03993", needs=(Need.GROUPS, Need.STARTS))
def majority_label(
    rollouts: Rollouts,
    context: Context,
    *,
    after: float = 0.3,
    slope: float = 0.05,
    resolution: float = 1.0,
    elements: Mapping[str, Sequence[int]] | None = None,
    keep: tuple[str, ...] = ("uncertainty",),
) -> Rollouts:
    """Where a start's success detector may err: success is to end as the majority of its episodes, once that holds.

    A robot's answer is where an episode ends: final states, as differences to their mean in the first iteration,
    divided by the root mean square of an element's differences in the first iteration in which it varies, and rounded
    to multiples of `resolution`. elements: field of the observation -> the elements that are the answer, such as those
    of an object's place; by default all of all fields, where velocities alone make every end another answer.
    After the fraction `after` of the run, an answer replaces the detector of an initial state where its share rises
    over the visits by at least `slope` each (.025 in the paper for small models), and it was the only most frequent
    answer of earlier visits. Success is then to end there; elsewhere it stays what the detector said. Of the other
    rewards only `keep` stays.
    """
    final = _ends(rollouts, elements) if elements else final_state(rollouts)
    memory = context.memory.setdefault("majority_label", {"spread": [0.0] * final.shape[1], "visits": {}})
    spread = torch.tensor(memory["spread"], device=final.device)
    # Runs of earlier versions, which kept no centre, measured what varied from 0: their answers stay what they are.
    first_centre = [float(each) for each in torch.where(spread < CONSTANT_SCALE, final.mean(0), 0.0)]
    centre = torch.tensor(memory.setdefault("centre", first_centre), device=final.device)
    # What has not varied so far has no unit: all answers agree on it.
    spread = torch.where(spread > 0, spread, (final - centre).square().mean(0).sqrt())
    spread = torch.where(spread < CONSTANT_SCALE, 0.0, spread)
    memory["spread"] = [float(each) for each in spread]
    cells = ((final - centre) / with_constants_kept(spread) / resolution).round().long()
    success = rollouts.row_success
    for group in distinct(rollouts.group)[0]:
        members = (rollouts.group == group).nonzero().squeeze(1)
        answers, index = distinct(cells[members])
        counts = index.bincount()
        is_only = int((counts == counts.max()).sum()) == 1
        visits = memory["visits"].setdefault(str(int(rollouts.extras["start"][members[0], 0])), [])
        newest = [float(counts.max()) / len(members), integers(answers[counts.argmax()]) if is_only else None]
        visits.append(newest)
        history = [None if answer is None else tuple(answer) for _, answer in visits]
        if context.share >= after and rises_to_majority([share for share, _ in visits], history, slope):
            success = success.index_put((members,), index == counts.argmax())
    last = last_chunk(rollouts)
    labelled = replace(rollouts, success=last & success[:, None])
    return success_only(labelled, context, keep=keep)


@mechanism(Slot.WEIGHT, "duration", source="MLE-RL (duration-aware gradients), arXiv:2509.01684")
def weigh_by_duration(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight a chunk by its number of control steps, so that asynchronous collection does not favour short ones.

    Takes a mask [b, t, K] and returns weights of that shape, which sum to 1.
    """
    weight = mask.float() * rollouts.duration[..., None]
    return weight / weight.sum().clamp(min=1e-12)


def decision_mean(mask: Tensor) -> Tensor:
    """Weight every row [t, K] equally, and in it every chunk: the mean over rows of means over chunks of means over
    steps (AgentFlow).
    """
    per_chunk = mask.sum(-1, keepdim=True)
    chunks = (per_chunk > 0).sum(-2, keepdim=True)
    rows = (chunks > 0).sum().clamp(min=1)
    return mask.float() / per_chunk.clamp(min=1) / chunks.clamp(min=1) / rows


@mechanism(Slot.WEIGHT, "decision_mean", source="AgentFlow, arXiv:2510.05592")
def weigh_decisions(mask: Tensor, rollouts: Rollouts) -> Tensor:
    """Weight every episode equally, in it every chunk, and in that every step (the mean over an agent's turns).

    The same as episode_mean if all chunks have as many scored steps. In minibatches of single chunks an episode's size
    is extras["episode_decisions"] [b, t], and weights are normalised to a sum of 1. Takes a mask [b, t, K] and returns
    weights of that shape.
    """
    if "episode_decisions" not in rollouts.extras:
        return decision_mean(mask)
    chunks = rollouts.extras["episode_decisions"][..., None].clamp(min=1)
    weight = mask.float() / mask.sum(-1, keepdim=True).clamp(min=1) / chunks
    return weight / weight.sum().clamp(min=1e-12)


@mechanism(
    Slot.REWARD,
    "as_demonstrated",
    source="PivotRL, arXiv:2603.21383",
    needs=(Need.GROUPS, Need.STARTS, Need.DEMONSTRATIONS, Need.DEMONSTRATED),
)
def as_demonstrated(
    rollouts: Rollouts, context: Context, *, within: float = 0.5, keep: tuple[str, ...] = ("uncertainty",)
) -> Rollouts:
    """Pay 1 for a first chunk after which the world is as a demonstration had it at that time, or that succeeds.

    That is, whose vector fields are within a distance `within` of extras["demonstrated"] (allocator=one_chunk): the
    root mean square over their entries, in standard deviations of the demonstrated ones of the batch; entries that are
    the same in all of them do not count. The paper's verifier of actions that do as well is a language model's; this
    distance stands for it. Of the world's rewards only `keep` stays.
    """
    target = rollouts.extras["demonstrated"][:, 0]
    following = sorted(rollouts.next_observation.items())
    fields = [value[:, 0, -1].flatten(1).double() for _, value in following if isinstance(value, Tensor)]
    is_known = ~target.isnan().any(-1)
    close = torch.zeros_like(is_known)
    if bool(is_known.any()):
        spread = target[is_known].std(0, unbiased=False)
        counts = spread > 1e-6
        difference = (torch.cat(fields, -1)[:, counts] - target[:, counts]) / spread[counts]
        close = is_known & (difference.square().mean(-1).sqrt() <= within)
    per_chunk = torch.zeros(rollouts.shape, device=target.device)
    per_chunk[:, 0] = (close | (rollouts.success[:, 0] & rollouts.alive[:, 0])).float()
    reward = at_last_step(rollouts, per_chunk)
    other_rewards = {name: rollouts.rewards[name] for name in keep if name in rollouts.rewards}
    return replace(rollouts, rewards={"as_demonstrated": reward, **other_rewards})
