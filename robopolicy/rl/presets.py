"""Algorithm presets: the mechanisms in each slot (all can be overridden), and additional needs.

`RatioLevel` is the unit of one probability ratio: a step, an action, a decision (action chunk) or an episode.
"""

from enum import Enum
from typing import Any

from robopolicy.rl.registry import Need


class RatioLevel(Enum):
    """Unit of one probability ratio, and whether its steps share the sum or the mean of their log-ratios.

    step: every single step (PPO on tokens, DPPO); action: the tokens of one control step (Rank-GRPO); decision: the
    complete chunk (ReinFlow, FPO); episode: the complete episode (GSPO uses episode_mean).
    """

    STEP = "step"
    ACTION_SUM = "action_sum"
    ACTION_MEAN = "action_mean"
    DECISION_SUM = "decision_sum"
    DECISION_MEAN = "decision_mean"
    EPISODE_SUM = "episode_sum"
    EPISODE_MEAN = "episode_mean"

    @property
    def needs_all_steps(self) -> bool:
        """Whether a random subset of a chunk's steps would change its meaning: a sum, or the assignment of tokens to
        actions.
        """
        return self not in (RatioLevel.STEP, RatioLevel.DECISION_MEAN, RatioLevel.EPISODE_MEAN)

    @property
    def shares_sums(self) -> bool:
        """Whether each of several steps contains the sum of all their log-ratios, so that summing again would count
        them repeatedly.
        """
        return self in (RatioLevel.ACTION_SUM, RatioLevel.DECISION_SUM, RatioLevel.EPISODE_SUM)

    @property
    def whole_episodes(self) -> bool:
        """Whether minibatches must contain complete episodes."""
        return self in (RatioLevel.EPISODE_SUM, RatioLevel.EPISODE_MEAN)


PRESETS: dict[str, dict[str, Any]] = {
    "dppo": {"advantage": "gae", "credit": ("denoising_discount",), "coefficient": "ppo", "weight": "step_mean"},
    "ppo": {"advantage": "gae", "coefficient": "ppo", "weight": "step_mean"},
    "grpo": {"advantage": "grpo", "coefficient": "ppo", "weight": "episode_mean"},
    "agentflow": {
        "advantage": "grpo",
        "coefficient": "ppo",
        "weight": "decision_mean",
        "auxiliaries": ("kl_base",),
        "options": {"ppo": {"low": 0.2, "high": 0.3}, "kl_base": {"weight": 0.001}},
    },
    "dr_grpo": {"advantage": "dr_grpo", "coefficient": "ppo", "weight": "constant"},
    "rloo": {"advantage": "rloo", "coefficient": "ppo", "weight": "step_mean"},
    "dapo": {"advantage": "grpo", "coefficient": "ppo", "weight": "step_mean", "selection": ("mixed_outcomes",)},
    "gspo": {
        "advantage": "grpo",
        "coefficient": "ppo",
        "weight": "episode_mean",
        "ratio_level": RatioLevel.EPISODE_MEAN,
    },
    "branch_grpo": {
        "advantage": "branch_grpo",
        "coefficient": "ppo",
        "weight": "step_mean",
        "options": {"branch_grpo": {"beta": 1.0, "width": "extremes"}},
    },
    "mc_grpo": {"advantage": "mc_grpo", "coefficient": "ppo", "weight": "step_mean"},
    "ngrpo": {
        "advantage": "ngrpo",
        "coefficient": "ppo",
        "weight": "step_mean",
        "options": {"ppo": {"low": 0.16, "high": 0.24}},
    },
    "gigpo": {"advantage": "gigpo", "coefficient": "ppo", "weight": "step_mean"},
    "step_grpo": {"advantage": "step_groups", "coefficient": "ppo", "weight": "step_mean"},
    "grpo_guard": {"advantage": "grpo", "coefficient": "grpo_guard", "weight": "step_mean"},
    "w_reinforce": {"advantage": "w_reinforce", "coefficient": "ppo", "weight": "step_mean"},
    "pacs": {"advantage": "dr_grpo", "coefficient": "pacs", "weight": "constant"},
    "reinforce_pp": {"advantage": "reinforce_pp", "coefficient": "ppo", "weight": "step_mean"},
    "mdpo": {"advantage": "gae", "coefficient": "mdpo", "weight": "step_mean"},
    "truncated_ppo": {"advantage": "egae", "coefficient": "ppo", "weight": "step_mean"},
    "spear": {
        "advantage": "grpo",
        "coefficient": "clip_cov",
        "weight": "step_mean",
        "rewards": ("success_only",),
        "replay": "spear",
        "options": {"clip_cov": {"share": 0.02}},
    },
    "remix": {
        "advantage": "grpo",
        "coefficient": "decoupled_ppo",
        "weight": "step_mean",
        "replay": "remix",
        "auxiliaries": ("kl_convex",),
    },
    "prime": {
        "models": ("prime",),
        "selection": ("mixed_outcomes",),
        "advantage": "process_rloo",
        "coefficient": "ppo",
        "weight": "step_mean",
    },
    "oprl": {"models": ("oprl",), "advantage": "process_steps", "coefficient": "ppo", "weight": "step_mean"},
    "spa": {"models": ("progress",), "advantage": "step_groups", "coefficient": "ppo", "weight": "step_mean"},
    "digi_q": {
        "models": ("q_ensemble",),
        "advantage": "q_values",
        "coefficient": "none",
        "weight": "step_mean",
        "auxiliaries": ("best_of_n",),
        "options": {"q_ensemble": {"target": "td"}},
    },
    "igpo": {
        "models": ("q_ensemble",),
        "rewards": ("information_gain",),
        "advantage": "step_groups",
        "coefficient": "ppo",
        "weight": "step_mean",
        "options": {
            "q_ensemble": {"held_out": True},
            "step_groups": {"episode_weight": 0.0, "scale": False, "padded": True, "discount": 1.0},
        },
    },
    "drpo": {
        "advantage": "grpo",
        "coefficient": "drpo",
        "weight": "constant",
        "options": {"constant": {"length": 1.0}},
    },
    "dpo": {"advantage": "grpo", "coefficient": "dpo", "weight": "constant"},
    "sppo": {"advantage": "grpo", "coefficient": "sppo", "weight": "constant"},
    "p3o": {"advantage": "grpo", "coefficient": "p3o", "weight": "constant"},
    "grape": {
        "rewards": ("gcpg",),
        "advantage": "best_and_worst",
        "coefficient": "tpo",
        "weight": "constant",
        "replay": "preferences",
        "options": {"constant": {"length": 1.0}},
    },
    "ac_flow": {
        "models": ("flow_critic",),
        "advantage": "flow_values",
        "coefficient": "clipped_advantage",
        "weight": "step_mean",
        "auxiliaries": ("velocity",),
    },
    "afd": {
        "models": ("discriminator",),
        "advantage": "discriminator",
        "coefficient": "negative_aware",
        "weight": "step_mean",
        "auxiliaries": ("velocity",),
    },
    "fpo": {
        "advantage": "gae",
        "coefficient": "ppo",
        "weight": "step_mean",
        "ratio_level": RatioLevel.DECISION_MEAN,
        "needs": (Need.MATCHING,),
    },
    "distillation": {"advantage": "grpo", "coefficient": "opd", "weight": "step_mean"},
}
"""Algorithm presets by name: their mechanisms per slot, and options; each can be overridden."""
