"""Run LightRFT's trainers: replace ``from lightrft.strategy import get_strategy`` by the one of this package.

Input: the namespace of LightRFT's parser. Output: a `LightRFTStrategy`. docs/coming_from_lightrft.md lists all names.
"""

from fsdp2_strategy.integrations.lightrft.generation import Generation
from fsdp2_strategy.integrations.lightrft.strategy import EngineStatus, LightRFTStrategy, get_strategy, is_engine

__all__ = ["EngineStatus", "Generation", "LightRFTStrategy", "get_strategy", "is_engine"]
