"""One learner for tokens, denoising steps and flow steps: rollouts become coefficients on log-probabilities.

Everything here is a small function over tensors. It knows the protocols of `robopolicy.core` and nothing of concrete
worlds, policies or configurations. The form of every policy loss is `-sum(w * sg(c) * logp) + auxiliaries`.
"""
