"""The names of other libraries, each a few lines over ours."""

from . import keras as keras, torch as torch
