"""The zoo, whole."""

import zoo_control_flow, zoo_custom_rules, zoo_devices, zoo_effects, zoo_values  # noqa: E401, F401
from specimen import ZOO as ZOO, Specimen as Specimen
