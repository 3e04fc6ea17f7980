"""Predicts the error of a policy from the statistics of a run."""

from ._predict import predict as predict
from ._prediction import Prediction as Prediction, Reason as Reason
