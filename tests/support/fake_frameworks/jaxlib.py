"""A stand-in for JAX's library, whose old versions name the CUDA version."""

from tests.support.fake_frameworks.standin import trouble

__version__ = "0.4.20" if trouble("jax") == "cpu" else "0.4.20+cuda11.cudnn86"
