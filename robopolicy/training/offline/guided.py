"""Synthetic episodes in addition to recorded ones, sampled as whole subsequences and guided towards the improving
policy.

Source: policy-guided diffusion, Jackson et al. 2024, arXiv:2404.06356; the generator is the TrajectoryDiffusion of
`worldmodels`. A policy of action chunks has no likelihood of single actions. It acts at every C-th step of the denoised
subsequence, and each step's action is guided towards its chunk as by a Gaussian around it (the paper does so for
deterministic policies). With offline.critic.redraw_every they
are sampled again for the agent as it learns, as in the paper; else once, for the initial policy.
Axes: N subsequence, L step, S state, A action, T policy call, H history, C chunk.
"""

import torch
from einops import rearrange
from torch import Tensor

from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError, DataError
from robopolicy.core.policy import Policy
from robopolicy.core.randomness import Generators
from robopolicy.core.returns import PROGRESS, SUCCESS
from robopolicy.core.spec import TASK, WorldSpec
from robopolicy.core.vectors import StateVector
from robopolicy.rl.offline.interface import recorded_range
from robopolicy.training.configuration import FitConfig
from robopolicy.training.fit import fit_stages
from robopolicy.training.offline.configuration import GuidedConfig
from worldmodels.configuration import TrajectoryConfig
from worldmodels.trajectory_diffusion import LogProb, TrajectoryDiffusion


class GuidedGenerator:
    """A diffusion model of subsequences of `episodes`, which draws synthetic episodes guided towards a policy.

    policy: the first one; seed: of the model's weights. Training and sampling run on the device of `generators`, which
    must be the policies'. Raises ConfigError when states are not vectors or there are several instructions, DataError
    when rewards, success or the observations after the last actions are not recorded.
    """

    def __init__(self, policy: Policy, episodes: Episodes, config: GuidedConfig, generators: Generators, seed: int):
        require_vectors(policy, episodes)
        cpu_episodes = episodes.to("cpu")
        spec = WorldSpec(
            "recorded",
            StateVector.of(cpu_episodes.observation_fields).fields,
            cpu_episodes.action_field,
            cpu_episodes.fps,
            int(cpu_episodes.lengths.max()),
            rewards=tuple(cpu_episodes.rewards or ()),
            instructions=(cpu_episodes.tasks[0],),
        )
        sizes = TrajectoryConfig(length=config.length, width=config.width, batch_size=config.batch_size)
        self.model = TrajectoryDiffusion.build(sizes, spec, cpu_episodes, seed).to(generators.device)
        fit_stages(self.model, cpu_episodes, FitConfig(steps=config.steps, learning_rate=2e-3), generators)
        self.model.calibrate(cpu_episodes)
        self.model.eval()
        self.config = config
        self.seed = seed
        self.recorded = cpu_episodes.to(generators.device)

    def draw(self, policy: Policy, generator: torch.Generator) -> Episodes:
        """Draw `config.episodes` episodes, guided towards `policy`.

        An episode is a subsequence up to success, which ends the task; without success it is truncated, so the value
        after its last state is bootstrapped.
        """
        target = decided(policy, self.model, self.recorded.tasks[0], self.seed)
        return as_episodes(
            self.model,
            self.model.generate(self.config.episodes, generator, target, self.config.guidance),
            self.recorded,
        )


def require_vectors(policy: Policy, episodes: Episodes) -> None:
    """Raise ConfigError or DataError with the reason when synthetic episodes cannot be generated for this policy."""
    cameras = sorted({*policy.spec.cameras, *episodes.cameras})
    if cameras:
        raise ConfigError(
            f"Guided episodes support vector observations only, but the policy reads images (camera '{cameras[0]}'): "
            "use imagined episodes of a world model that decodes images instead."
        )
    if len(set(episodes.tasks)) > 1:
        raise ConfigError(
            f"Guided episodes need data of one task, but this data has {len(set(episodes.tasks))} instructions: "
            "use episodes with one instruction."
        )
    if episodes.step_success is None:
        raise DataError("Guided episodes end at success, but this data does not record which steps succeeded.")


def decided(policy: Policy, model: TrajectoryDiffusion, instruction: str, seed: int) -> LogProb:
    """Return the log-probability of actions under a Gaussian around the chunks of `policy`, up to a constant.

    (states [N * L, S], actions [N * L, A]) of whole subsequences -> [N * L]. The policy acts at every C-th step, with
    the history inside the subsequence and always the same noise, so that all denoising steps guide towards the same
    target. The Gaussian is as wide as the recorded actions.
    """
    spec, length = policy.spec, model.config.length
    begins = torch.arange(0, length, spec.chunk)
    # Before the subsequence its first frame repeats.
    frames = (begins[:, None] + torch.arange(1 - spec.history, 1)).clamp(min=0)
    width = model.std[2 * model.states :]

    @torch.no_grad()
    def decisions(states: Tensor) -> Tensor:
        subsequences = rearrange(states, "(n l) s -> n l s", l=length)
        fields = model.state_vector.unpack(rearrange(subsequences[:, frames], "n t h s -> (n t) h s"))
        observation = {key: fields[key] for key in spec.observation} | {
            TASK: [instruction] * (len(subsequences) * len(begins))
        }
        # A fixed seed: drawn anew at every denoising step, decisions would pull elsewhere each time.
        noise = torch.Generator(states.device).manual_seed(seed)
        actions = policy.act(observation, noise, deterministic=True).actions
        return rearrange(actions, "(n t) c a -> n (t c) a", n=len(subsequences))[:, :length].flatten(0, 1)

    def log_prob(states: Tensor, actions: Tensor) -> Tensor:
        # Unnormalised: the guidance uses the gradient alone.
        return -0.5 * ((actions - decisions(states)) / width).square().sum(-1)

    return log_prob


@torch.no_grad()
def as_episodes(model: TrajectoryDiffusion, steps: Tensor, recorded: Episodes) -> Episodes:
    """Convert subsequences [N, L, S + A] to episodes of up to L - 1 actions in the format of `recorded`, ending at
    success.

    Actions are clipped to the range of the recorded ones.
    """
    states, actions = steps.split([model.states, model.actions], -1)
    low, high = (bound.to(steps.device) for bound in recorded_range(recorded))
    clipped_actions = actions[:, :-1].clamp(low, high)
    before, after = states[:, :-1].flatten(0, 1), states[:, 1:].flatten(0, 1)
    success = rearrange(model.heads.succeeded(after), "(n l) -> n l", n=len(steps))
    progress = rearrange(
        model.heads.progress(before, clipped_actions.flatten(0, 1), after), "(n l) -> n l", n=len(steps)
    )
    success_count = success.long().cumsum(1)
    kept_mask = (success_count == 0) | ((success_count == 1) & success)  # up to the first success, that step included
    lengths = kept_mask.sum(1)
    # The frame before the first action, and then one frame behind every kept action.
    frame_mask = torch.cat([torch.ones_like(kept_mask[:, :1]), kept_mask], 1)
    return Episodes(
        observation_fields=model.state_vector.fields,
        action_field=recorded.action_field,
        fps=recorded.fps,
        observation=dict(model.state_vector.unpack(states[frame_mask])),
        actions=clipped_actions[kept_mask],
        lengths=lengths,
        tasks=(recorded.tasks[0],) * len(steps),
        rewards={PROGRESS: progress[kept_mask], SUCCESS: model.heads.bonus * success[kept_mask].float()},
        step_success=success[kept_mask],
        terminated=success.any(1),
        final_known=torch.ones(len(steps), dtype=torch.bool, device=steps.device),
    )
