"""Critics of action chunks: their inputs and fitting, and policies built from an agent with critics.

Such an agent acts itself, or selects for a frozen policy, whose behaviour is then preserved. It selects the policy's
initial noise (DSRL, Wagenmaker et al. 2025, arXiv:2506.15799): the agent's action is the initial noise of a diffusion's
or flow's noise-free sampler. Or it selects among several sampled action chunks of the policy (IDQL, Hansen-Estruch et
al. 2023, arXiv:2304.10573). A critic of recorded data reads the data's vectors, and for images the features of the
policy's encoder.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from robopolicy.core.candidates import best_of
from robopolicy.core.checkpoints import read_weights, require_format, restoring, write_checkpoint
from robopolicy.core.episodes import Episodes
from robopolicy.core.errors import ConfigError
from robopolicy.core.examples import example_observation
from robopolicy.core.former_names import FormerName, keep_former_names
from robopolicy.core.modules import Module, device_of
from robopolicy.core.origin import described_origin
from robopolicy.core.policy import ActsFromNoise, DecidesFromNoise, Decision, Policy, TensorObservation
from robopolicy.core.progress import progress
from robopolicy.core.randomness import Generators
from robopolicy.core.run import RunFolder
from robopolicy.core.spec import IMAGE_PREFIX, TASK, Field, PolicySpec, validate_observation
from robopolicy.core.structured import from_plain, to_plain
from robopolicy.core.transitions import Transitions
from robopolicy.core.world import Rows
from robopolicy.nn.optimisers import require_finite
from robopolicy.policies.network import freeze
from robopolicy.rl.offline.agent import OfflineAgent, minimum_value_of
from robopolicy.rl.offline.configuration import AGENTS
from robopolicy.rl.offline.interface import Interface, recorded_range
from robopolicy.training.encoders import load_with_encoder
from robopolicy.training.state import load_trainer, save_trainer

BASE, ENCODER = "base", "encoder"
"""Checkpoint folders of the frozen policy that is steered, and of the policy whose features an agent reads."""


@runtime_checkable
class SavableInside(Module, Policy, Protocol):
    """A policy that can be saved inside the checkpoint of a wrapping policy."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        ...


@runtime_checkable
class Steerable(SavableInside, DecidesFromNoise, Protocol):
    """A policy that can also be steered by its initial noise."""


class RunsAgent(Policy, Protocol):
    """A policy that executes an agent's actions, directly or through a frozen policy."""

    agent: OfflineAgent
    interface: Interface

    def actions_of(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Convert flat agent actions [B, A'] in [-1, 1] to world actions [B, C, A] in the world's units."""
        ...

    def enable_agent(self) -> None:
        """Let the agent act from now on."""
        ...

    def propose(self, observation: TensorObservation, generator: torch.Generator) -> Tensor | None:
        """Return a base policy's flat chunks [B, K, A'] at observations [B, H, ...], which are stored with the
        transitions that lead there; None if there is no such policy.
        """
        ...

    def explore(
        self, observation: TensorObservation, state: Tensor, generator: torch.Generator, proposals: Tensor | None
    ) -> Tensor:
        """Return the flat actions [B, A'] to execute in states [B, S]; proposals: those of these observations."""
        ...

    def remembered(self, before: TensorObservation, after: TensorObservation) -> dict[str, Tensor]:
        """Return further columns [B, ...] of the replay buffer, from the observations before and after a chunk."""
        ...

    def learn_beside(
        self, columns: Mapping[str, Tensor], count: int, updates: int, generators: Generators
    ) -> dict[str, Tensor]:
        """Train what learns beside the agent, after a batch of episodes with `updates` of the agent, on the buffer's
        first `count` rows; returns metrics by name, scalars.
        """
        ...

    def tree_beside(self) -> dict[str, Any]:
        """Return the state of what learns beside the agent, in a form that can be saved."""
        ...

    def restore_beside(self, tree: Mapping[str, Any]) -> None:
        """Restore the state from `tree`."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the critics."""
        ...


class LearnsOnline:
    """Defaults of `RunsAgent`: the agent acts by its own actor, and there is no base policy beside it."""

    agent: Any

    def propose(self, observation: TensorObservation, generator: torch.Generator) -> Tensor | None:
        """Return None: no base policy proposes chunks."""
        return None

    def explore(
        self, observation: TensorObservation, state: Tensor, generator: torch.Generator, proposals: Tensor | None
    ) -> Tensor:
        """Return the agent's sampled actions [B, A'] in states [B, S]."""
        return self.agent.act(state, generator)

    def remembered(self, before: TensorObservation, after: TensorObservation) -> dict[str, Tensor]:
        """Return no columns [B, ...]."""
        return {}

    def learn_beside(
        self, columns: Mapping[str, Tensor], count: int, updates: int, generators: Generators
    ) -> dict[str, Tensor]:
        """Learn nothing; returns no metrics."""
        return {}

    def tree_beside(self) -> dict[str, Any]:
        """Return {}: nothing learns beside the agent."""
        return {}

    def restore_beside(self, tree: Mapping[str, Any]) -> None:
        """Do nothing."""


class AgentAroundBase[Base: SavableInside](nn.Module):
    """Base class of policies around a frozen policy `base`, for which an agent chooses.

    interface: the agent's view of observations and actions.
    """

    def __init__(self, base: Base, agent: OfflineAgent, interface: Interface):
        super().__init__()
        self.base: Base = base
        freeze(base.parameters())
        self.agent, self.interface = agent, interface
        self._fast: Policy | None = None  # what computes the base's decisions in its place

    @property
    def spec(self) -> PolicySpec:
        """Spec of the base plus the agent's inputs."""
        base_spec = self.base.spec
        return replace(base_spec, observation={**base_spec.observation, **fields_of(self.interface)})

    def reset(self, rows: Rows = None) -> None:
        """Reset the base. rows: indices [R] of the episodes to forget, None for all."""
        self.base.reset(rows)

    @property
    def inner(self) -> Policy:
        """The acting policy: the base, or its accelerated replacement."""
        return self.base if self._fast is None else self._fast

    def around(self, inner: Policy) -> Self:
        """Return this policy, with shared weights, acting through `inner`, which computes the base's chunks."""
        copied_policy = copy.copy(self)
        object.__setattr__(copied_policy, "_fast", inner)  # a module's own way would register it in both
        return copied_policy

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return the base's encoding of observations [N, H, ...]; raises ConfigError when the base cannot encode."""
        if not isinstance(self.base, ExposesEncoder):
            raise ConfigError(f"{type(self.base).__name__} has no encode() method.")
        return self.base.encode(observation)


NewAgent = Callable[[Any, int, int], OfflineAgent]
"""Function (settings, size of a state, size of an action) -> agent."""


class AgentPolicy(LearnsOnline, nn.Module):
    """A `Policy` that executes the chunks of an agent's actor; `interface` builds the actor's inputs.

    fps: control rate of the world. The checkpoint includes the critics, so training can resume from it.
    """

    def __init__(self, agent: OfflineAgent, interface: Interface, fps: float):
        super().__init__()
        self.agent = agent
        self.interface = interface
        self.fps = fps

    @property
    def spec(self) -> PolicySpec:
        """Spec with the agent's inputs and without log-probabilities."""
        view, fields = self.interface, fields_of(self.interface)
        return PolicySpec(fields, view.action, view.history, view.chunk, view.chunk, 0, self.fps, view.instructions)

    def reset(self, rows: Rows = None) -> None:
        """Do nothing; no row [R] has state between policy calls."""

    begin_to_act = FormerName("enable_agent")

    def enable_agent(self) -> None:
        """Do nothing; the agent acts from the start."""

    def actions_of(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Convert flat chunks [B, C * A] to the world's units, [B, C, A]."""
        return self.interface.chunks(action)

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the actor's chunk [B, C, A]. Raises SpecError or NonFiniteError on an invalid observation."""
        return Decision(self.actions_of(observation, _acted(self, observation, generator, deterministic)))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the critics."""
        view = self.interface
        spec = {**view.to_json(), "fps": self.fps}
        write_checkpoint(
            folder, _described(self, "agent", spec), self.agent, lambda inside: _save_encoder(view, inside)
        )

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> "AgentPolicy":
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""
        require_format(folder, description)
        encoder = load_with_encoder(folder / ENCODER, device) if (folder / ENCODER).exists() else None
        with restoring(folder, "a policy"):
            agent, interface = _saved_agent(folder, description, encoder)
            fps = float(description["spec"]["fps"])
        return cls(read_weights(agent, folder, device), interface, fps).eval()


class SteeredPolicy(LearnsOnline, AgentAroundBase[Steerable]):
    """A `Policy` that runs `base` deterministically from initial noise that an agent chooses.

    The agent's actions are flattened noise [P, A] within the bounds of `interface.action`. steers: whether the agent
    already chooses the noise; until then the base acts unchanged. The checkpoint contains the base and the critics.
    """

    steers: Tensor

    def __init__(self, base: Steerable, agent: OfflineAgent, interface: Interface, steers: bool = True):
        super().__init__(base, agent, interface)
        self.register_buffer("steers", torch.tensor(steers))

    @property
    def spec(self) -> PolicySpec:
        """Spec of the base plus the agent's inputs, without log-probabilities."""
        return replace(super().spec, scored_steps=0)

    def around(self, inner: Policy) -> Self:
        """Return this policy, with shared weights, acting through `inner`, which computes the base's chunks.

        Raises ConfigError when `inner` cannot start from given noise.
        """
        if not isinstance(inner, ActsFromNoise):
            raise ConfigError(f"{type(inner).__name__} cannot start from given noise, which steering (DSRL) requires.")
        return super().around(inner)

    begin_to_act = FormerName("enable_agent")

    def enable_agent(self) -> None:
        """Let the agent choose the noise from now on."""
        self.steers.fill_(True)

    def decide(self, observation: TensorObservation, noise: Tensor) -> Tensor:
        """Run the base from noise [B, P, A] to actions [B, C, A]; differentiable in the noise."""
        # The base's weights are frozen but not detached: the agent's gradient runs through its denoising steps.
        return self.base.to_actions(self.base.trajectory(observation, noise)[:, -1])

    def actions_of(self, observation: TensorObservation, action: Tensor) -> Tensor:
        """Run the base from the noise that flat actions [B, P * A] in [-1, 1] encode; return actions [B, C, A]."""
        return self.decide(observation, self.interface.chunks(action))

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the base's actions [B, C, A] for the agent's noise; without `deterministic` the noise is sampled.

        Raises SpecError or NonFiniteError on an invalid observation.
        """
        if not bool(self.steers):
            validate_observation(observation, self.spec.observation, history=self.spec.history)
            return Decision(self.inner.act(observation, generator, deterministic=deterministic).actions)
        decide = self.decide if self._fast is None else cast(ActsFromNoise, self._fast).from_noise
        return Decision(decide(observation, self.interface.chunks(_acted(self, observation, generator, deterministic))))

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the base and the critics."""
        save_around(self, folder, "steered", {"steers": bool(self.steers)})

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> "SteeredPolicy":
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""

        def make(base: Policy, agent: OfflineAgent, interface: Interface) -> "SteeredPolicy":
            return cls(require_steerable(base), agent, interface, bool(description["steers"]))

        return load_around(folder, description, device, make)


class BestOfPolicy(AgentAroundBase[SavableInside]):
    """A `Policy` that samples several chunks from `base` and executes the one with the highest minimum over the
    critics.

    interface: the agent's view of observations and chunks, whose length is the base's; count: number of sampled chunks,
    stored in a buffer; with 1 the base acts unchanged. Log-probabilities are those of the selected chunk and ignore the
    selection. The checkpoint contains the base and the critics. Raises ConfigError when chunk lengths differ, count is
    below 1 or the base cannot be saved.
    """

    count: Tensor

    def __init__(self, base: Policy, agent: OfflineAgent, interface: Interface, count: int = 16):
        if count < 1:
            raise ConfigError(f"Best-of-N needs at least 1 candidate, got {count}.")
        super().__init__(require_chunks_of(base, interface), agent, interface)
        self.register_buffer("count", torch.tensor(count))

    @torch.no_grad()
    def act(
        self, observation: TensorObservation, generator: torch.Generator, *, deterministic: bool = False
    ) -> Decision:
        """Return the best chunk: actions [B, C, A], with the base's latents, logp and mask.

        deterministic: the base's noise-free chunk is among the candidates. Raises the errors of base and critics.
        """
        acting, count = self.inner, int(self.count)
        if count == 1:
            return acting.act(observation, generator, deterministic=deterministic)
        score = minimum_value_of(self.agent, self.interface)
        return best_of(acting, observation, generator, count, score, deterministic=deterministic)[0]

    def save(self, folder: Path) -> None:
        """Write a checkpoint atomically, including the base and the critics."""
        save_around(self, folder, "best_of", {"count": int(self.count)})

    @classmethod
    def load(cls, folder: Path, description: Mapping[str, Any], device: torch.device | str = "cpu") -> "BestOfPolicy":
        """Load what `save` wrote; raises CheckpointError when the files are inconsistent."""

        def make(base: Policy, agent: OfflineAgent, interface: Interface) -> "BestOfPolicy":
            return cls(base, agent, interface, int(description["count"]))

        return load_around(folder, description, device, make)


def require_chunks_of(base: Policy, interface: Interface) -> SavableInside:
    """Return `base`, typed as a policy among whose chunks an agent chooses; raises ConfigError when chunk lengths
    differ or it cannot be saved.
    """
    if interface.chunk != base.spec.chunk:
        raise ConfigError(
            f"Chunk lengths differ: the critic evaluates {interface.chunk} control steps, the policy outputs "
            f"{base.spec.chunk}."
        )
    if not isinstance(base, SavableInside):
        raise ConfigError(
            f"{type(base).__name__} has no save(), so it cannot be saved inside the checkpoint of a wrapping policy."
        )
    return base


def require_steerable(policy: Policy) -> Steerable:
    """Return `policy`, typed as a policy that acts from given noise; raises ConfigError for any other."""
    if not isinstance(policy, Steerable):
        raise ConfigError(
            f"{type(policy).__name__} has no initial noise to choose: steering works only with diffusion and flow "
            "policies."
        )
    return policy


def steer(
    base: Policy,
    config: Any,
    fields: Mapping[str, Field],
    instructions: tuple[str, ...],
    *,
    bound: float,
    seed: int,
    kind: str,
    steers: bool = True,
) -> SteeredPolicy:
    """Wrap `base` in a steered policy with a new agent of type `kind` and its `config`, which reads `fields`; noise is
    limited to +-bound.

    Raises ConfigError when the base has no initial noise or the bound is not positive.
    """
    steerable = require_steerable(base)
    if bound <= 0:
        raise ConfigError(f"bound={bound} must be positive.")
    steps, size = steerable.noise_shape
    noise = Field((size,), low=-bound, high=bound)
    interface = interface_of(base, fields, noise, instructions, chunk=steps)
    agent = AGENTS.builds(kind)(config, interface.size, interface.actions, seed)
    return SteeredPolicy(steerable, agent, interface, steers)


def _acted(
    policy: "AgentPolicy | SteeredPolicy", observation: TensorObservation, generator: torch.Generator, sure: bool
) -> Tensor:
    """Validate the observation and return the agent's flat actions [B, A']."""
    spec = policy.spec
    validate_observation(observation, spec.observation, history=spec.history)
    return policy.agent.act(policy.interface.state(observation), None if sure else generator)


def fields_of(interface: Interface) -> dict[str, Field]:
    """Return the observation fields that an agent reads."""
    return {key: interface.fields[key] for key in interface.keys}


def save_around(policy: AgentAroundBase[Any], folder: Path, kind: str, own: Mapping[str, Any]) -> None:
    """Write the checkpoint of a policy that wraps a base, atomically; own: config entries specific to this class."""
    config = {**_described(policy, kind, _spec_of(policy.base)), **own}

    def inside(place: Path) -> None:
        policy.base.save(place / BASE)
        features = policy.interface.features
        if isinstance(features, Encoder) and features.policy is not policy.base:
            _save_encoder(policy.interface, place)  # the base has been trained since the critics began

    write_checkpoint(folder, config, policy.agent, inside)


def load_around[Choosing: nn.Module](
    folder: Path,
    description: Mapping[str, Any],
    device: torch.device | str,
    make: Callable[[Policy, Any, Interface], Choosing],
    new_agent: NewAgent | None = None,
) -> Choosing:
    """Load what `save_around` wrote; raises CheckpointError when the files are inconsistent.

    new_agent: builds the agent from its settings if that is not what they name.
    """
    require_format(folder, description)
    base = load_with_encoder(folder / BASE, device)
    encoder = load_with_encoder(folder / ENCODER, device) if (folder / ENCODER).exists() else base
    with restoring(folder, "a policy"):
        agent, interface = _saved_agent(folder, description, encoder, new_agent)
        policy = make(base, agent, interface)
    read_weights(agent, folder, device)
    return policy.to(device).eval()


def _spec_of(base: Policy) -> dict[str, Any]:
    """Return the observation and action spec for the checkpoint of a policy that wraps `base`."""
    spec = base.spec
    return {
        "observation": {key: field.to_json() for key, field in spec.observation.items()},
        "action": spec.action.to_json(),
        "fps": spec.fps,
        "instructions": list(spec.instructions),
    }


def _described(policy: "AgentPolicy | AgentAroundBase[Any]", kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a policy whose class is registered as `kind`."""
    agent = policy.agent
    path = f"{type(agent.config).__module__}:{type(agent.config).__qualname__}"
    name = next((name for name, known_path in AGENTS.paths().items() if known_path == path), None)
    return {
        "kind": kind,
        "spec": spec,
        "agent": {"kind": name or AGENTS.name_of(type(agent)), "config": to_plain(agent.config)},
        "interface": policy.interface.to_json(),
        **described_origin(policy),
    }


def _saved_agent(
    folder: Path, description: Mapping[str, Any], encoder: Policy | None, new_agent: NewAgent | None = None
) -> tuple[OfflineAgent, Interface]:
    """Build the agent that a checkpoint describes, without its weights, and its interface."""
    agent_entry, view = description["agent"], description["interface"]
    agent_class = AGENTS.saved(agent_entry["kind"], folder)
    config = from_plain(AGENTS.configuration(agent_entry["kind"]), agent_entry["config"], "agent.config")
    features = Encoder(encoder) if view["feature_size"] and encoder is not None else None
    interface = Interface.from_json(view, features)
    if new_agent is not None:
        return new_agent(config, interface.size, interface.actions), interface
    return agent_class(config, interface.size, interface.actions, 0), interface


def _save_encoder(interface: Interface, folder: Path) -> None:
    """Save the policy whose features the agent reads, if any, into a checkpoint folder."""
    if isinstance(interface.features, Encoder):
        cast(Steerable, interface.features.policy).save(folder / ENCODER)


@runtime_checkable
class ExposesEncoder(Protocol):
    """A policy that exposes its encoder's output for an observation."""

    def encode(self, observation: TensorObservation) -> Mapping[str, Tensor]:
        """Return conditions [N, ...] of observations [N, H, ...], by name."""
        ...


class Encoder:
    """Frozen features [N, F] of observations [N, H, ...], computed by the policy's current encoder.

    size: F. Raises ConfigError when the policy cannot encode.
    """

    def __init__(self, policy: Policy):
        if not isinstance(policy, ExposesEncoder):
            raise ConfigError(
                f"{type(policy).__name__} reads only images and has no encode() method, so a critic has no "
                "input: add vector observations, or use a policy that can encode."
            )
        self.policy: Policy = policy
        self._encode = policy.encode
        observation = example_observation(policy.spec, 1, torch.Generator().manual_seed(0), device_of(policy))
        self.size = self(observation).shape[1]

    @torch.no_grad()
    def __call__(self, observation: TensorObservation) -> Tensor:
        """Return the features [N, F]."""
        keys = (*self.policy.spec.observation, TASK)
        condition = self._encode({key: observation[key] for key in keys if key in observation})
        return torch.cat([value.flatten(1) for value in condition.values()], -1).float()


def critic_interface(policy: Policy, episodes: Episodes, *, deployed: bool = False) -> Interface:
    """Build the critic interface for chunks of `policy` in `episodes`; chunks are as long as the policy's own.

    If the policy has cameras, frozen features of its current encoder are part of the state. Vectors are all those in
    the data, including ones that the policy does not read: a critic may use privileged state, unless it is deployed
    with the policy. Raises ConfigError when there are only images and the policy cannot encode them.
    """
    tasks = tuple(sorted(set(episodes.tasks) | set(policy.spec.instructions)))
    bounds = recorded_range(episodes)
    # A copy: the critic's inputs must not move while the policy's encoder learns.
    seer = copy.deepcopy(policy) if policy.spec.cameras else policy
    policy_fields = {key: field for key, field in episodes.observation_fields.items() if key in policy.spec.observation}
    fields = policy_fields if deployed else episodes.observation_fields
    return interface_of(seer, fields, episodes.action_field, tasks, bounds=bounds)


def interface_of(
    policy: Policy,
    fields: Mapping[str, Field],
    action: Field,
    instructions: tuple[str, ...],
    *,
    chunk: int | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Interface:
    """Build the critic interface for `fields` and actions (or noise) like `action`, with images encoded by the policy.

    chunk: control steps of an action chunk, None for the policy's; bounds: low and high [A] when `action` has none.
    Raises ConfigError as `critic_interface` does.
    """
    spec = policy.spec
    vectors = {key: field for key, field in fields.items() if not key.startswith(IMAGE_PREFIX)}
    encoder = Encoder(policy) if spec.cameras and (isinstance(policy, ExposesEncoder) or not vectors) else None
    images = {key: field for key, field in spec.observation.items() if key.startswith(IMAGE_PREFIX)} if encoder else {}
    return Interface(
        {**vectors, **images},
        action,
        chunk=spec.chunk if chunk is None else chunk,
        instructions=instructions,
        features=encoder,
        feature_size=0 if encoder is None else encoder.size,
        history=spec.history,
        bounds=bounds,
    )


LOG_EVERY, SAVE_EVERY = 100, 1000


@dataclass(frozen=True)
class Redraw:
    """Data that depends on the agent: `draw` returns it after a number of updates, always the same for the same
    weights.

    every: number of updates between two draws.
    """

    every: int
    draw: Callable[[int], Transitions]


def fit_agent(
    agent: OfflineAgent,
    data: Transitions,
    steps: int,
    batch_size: int,
    generators: Generators,
    *,
    run: RunFolder | None = None,
    label: str = "critic",
    redraw: Redraw | None = None,
) -> dict[str, float]:
    """Update `agent` on random batches of `data` until it has done `steps` updates in total; returns its last metrics.

    run: receives metrics every hundred steps and a resume point named `label`; after a kill, the same call resumes and
    gives a bit-identical result. redraw: replaces the data as the agent learns. Raises NonFiniteError naming the step,
    and the agent's errors when the data lacks something.
    """
    data.check()
    place = None if run is None else run.path / "resume" / label
    step = _resumed(agent, generators, place, run, label)
    # What is drawn again is not saved: resume points lie where it is drawn, from the weights that they hold.
    save_every = SAVE_EVERY if redraw is None else redraw.every
    if redraw is not None and 0 < step < steps:
        data = redraw.draw(step)
    # After the resume point is read: statistics are taken from the same data again, not saved.
    agent.begin(data)
    figures: dict[str, torch.Tensor] = {}
    draws = generators[f"{label}/batches"]
    with progress(f"Fitting the {label}", steps) as advance:
        advance(step)
        while step < steps:
            figures = agent.update(data.draw(batch_size, draws), generators[f"{label}/update"])
            step += 1
            advance()
            if step % LOG_EVERY == 0 or step == steps:
                for name, value in figures.items():
                    require_finite(name, value, f"step {step} of the {label}")
                if run is not None:
                    run.log({f"{label}_step": step, **_floats(figures)})
            if place is not None and (step % save_every == 0 or step == steps):
                save_trainer(place, {"step": step, "agent": agent.tree(), "generators": generators.state()})
            if redraw is not None and step % redraw.every == 0 and step < steps:
                data = redraw.draw(step)
                agent.begin(data)
    return _floats(figures)


def _resumed(agent: OfflineAgent, generators: Generators, place: Path | None, run: RunFolder | None, label: str) -> int:
    """Restore the agent from a killed run's resume point; return the number of steps done."""
    state: Mapping[str, Any] | None = None if place is None else load_trainer(place)
    step = 0 if state is None else int(state["step"])
    if state is not None:
        agent.restore(state["agent"])
        generators.restore(state["generators"])
    if run is not None:
        run.rewind(f"{label}_step", step)
    return step


def _floats(figures: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in figures.items()}


keep_former_names(
    __name__, {"Kept": "SavableInside", "Acts": "RunsAgent", "Encodes": "ExposesEncoder", "steered": "steer"}
)
