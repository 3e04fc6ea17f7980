"""The zoo, whole."""

from specimen import Specimen as Specimen
from zoo_control_flow import CONTROL_FLOW
from zoo_custom_rules import CUSTOM_RULES
from zoo_devices import DEVICES
from zoo_effects import EFFECTS
from zoo_values import VALUES

ZOO = CONTROL_FLOW | CUSTOM_RULES | DEVICES | EFFECTS | VALUES
