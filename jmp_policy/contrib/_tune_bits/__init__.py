"""`tune_bits`: finds the format of each layer within a number of bits per weight."""

from ._bit_tuning import BitRow as BitRow, BitTuning as BitTuning
from ._tune_bits import tune_bits as tune_bits
