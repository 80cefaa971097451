"""Saving and restoring through Orbax: from one mesh onto another, and what is refused with which words."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.checkpoint import CheckpointError, load, restore, save, save_hf
from kvjax.models import Decoder, config_from_hf
