"""Record the experts that a mixture-of-experts model chooses for each token, and make another model choose the same.

`recorded` contains the recorded choices. `passes` records and replaces choices during one forward pass. `routers` finds
the modules of a model that choose experts. `replay` contains the context managers that users call.
"""

from fsdp2_strategy.parallel.routing.recorded import Routing
from fsdp2_strategy.parallel.routing.replay import record_routing, replay_routing

__all__ = ["Routing", "record_routing", "replay_routing"]
